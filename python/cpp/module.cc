// minference._core: the C++ library for Python. Arguments are checked by the library itself, so that
// a caller reads the same sentence as from C++.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <exception>
#include <string>
#include <vector>

#include "bindings.h"
#include "minference/error.h"
#include "minference/isa.h"
#include "minference/version.h"

namespace nb = nanobind;

namespace minference::python {
namespace {

// InvalidArgument -> ValueError, Unsupported -> NotImplementedError, IoError -> OSError. An unknown
// member of the family stays a RuntimeError, nanobind's own translation.
void translate(const std::exception_ptr& error, void* /*payload*/) {
  try {
    std::rethrow_exception(error);
  } catch (const InvalidArgument& e) {
    PyErr_SetString(PyExc_ValueError, e.what());
  } catch (const Unsupported& e) {
    PyErr_SetString(PyExc_NotImplementedError, e.what());
  } catch (const IoError& e) {
    PyErr_SetString(PyExc_OSError, e.what());
  }
}

std::vector<std::string> isa_levels() {
  std::vector<std::string> names;
  for (const IsaLevel level : available_isa_levels()) names.emplace_back(isa_name(level));
  return names;
}

}  // namespace
}  // namespace minference::python

NB_MODULE(_core, module) {
  namespace python = minference::python;
  nb::set_leak_warnings(false);  // what Python modules still hold at exit is no leak
  nb::register_exception_translator(python::translate);
  module.attr("__version__") = minference::version();
  module.def("isa_levels", &python::isa_levels,
             "Names of the instruction set levels that this machine can run, ascending.");
  python::bind_stats(module);
  python::bind_guard(module);
  python::bind_search(module);
  python::bind_segment(module);
  python::bind_pattern_file(module);
  python::bind_explanation(module);
  python::bind_method(module);
  python::bind_method_state(module);
  python::bind_sparse_index(module);
  python::bind_new_tensor(module);
  python::bind_attention(module);
}
