// Which of the two sets of kernels a device runs: Hopper's own or the general ones.
#pragma once

namespace minference::cuda {

// 90 (sm_90a), 80 (sm_80), or 0: the device of this major compute capability is too old. The environment
// variable MINFERENCE_FORCE_CUDA can ask for the general ones. Throws InvalidArgument when its value is
// none of "sm80" and "sm90a", Unsupported when the device has no kernels of the latter.
int device_kernels(int ordinal, int major);

// Of the current device. Throws Unsupported when it is too old.
int current_kernels();

}  // namespace minference::cuda
