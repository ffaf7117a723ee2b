// The parts of the extension module minference._core, one file per class.
#pragma once

#include <nanobind/nanobind.h>

namespace minference::python {

void bind_explanation(nanobind::module_& module);
void bind_guard(nanobind::module_& module);
void bind_method(nanobind::module_& module);
void bind_method_state(nanobind::module_& module);
void bind_new_tensor(nanobind::module_& module);
void bind_pattern_file(nanobind::module_& module);
void bind_search(nanobind::module_& module);
void bind_segment(nanobind::module_& module);
void bind_sparse_index(nanobind::module_& module);
void bind_stats(nanobind::module_& module);
void bind_attention(nanobind::module_& module);  // after the classes: its signature names them

}  // namespace minference::python
