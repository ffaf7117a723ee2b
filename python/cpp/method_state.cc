// Class MethodState: what a method remembers of one layer's prompts from chunk to chunk.
#include "method_state.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "minference/error.h"

namespace nb = nanobind;

namespace minference::python {

StateLock::StateLock(SharedMethodState* shared) : shared_(shared) {
  if (shared_ != nullptr && shared_->in_use.exchange(true)) {
    throw InvalidArgument(
        "state is in use by a call on another thread; legal: one state per layer and batch");
  }
}

StateLock::~StateLock() {
  if (shared_ != nullptr) shared_->in_use = false;
}

void bind_method_state(nb::module_& module) {
  nb::class_<SharedMethodState>(
      module, "MethodState",
      "What a method remembers of the prompts of one layer from chunk to chunk.\n\nGive the same "
      "object with every chunk of the same sequences, and a new one with others, one per\nlayer. A "
      "prompt that begins at position 0 needs no new one.")
      .def(nb::init<>())
      .def_prop_ro(
          "kv_lens", [](const SharedMethodState& shared) { return shared.state.kv_lens; },
          "Keys of each sequence that the last estimate saw; empty before the first.")
      .def(
          "reset",
          [](SharedMethodState& shared) {
            const StateLock lock(&shared);
            shared.state = MethodState{};
          },
          "Forgets everything.");
}

}  // namespace minference::python
