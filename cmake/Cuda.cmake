# libminference_cuda.so: the CUDA kernels, in a library of their own that the core loads when a tensor
# lies on a device. It brings the CUDA runtime with it and links no driver.
include_guard(GLOBAL)

enable_language(CUDA)
find_package(CUDAToolkit 12.3 REQUIRED)

# minference_add_cuda_objects(<name> <architectures> <file...>): an object library for some devices.
function(minference_add_cuda_objects name architectures)
  list(TRANSFORM ARGN PREPEND "${PROJECT_SOURCE_DIR}/" OUTPUT_VARIABLE sources)
  add_library(${name} OBJECT ${sources})
  set_target_properties(${name} PROPERTIES
    CUDA_ARCHITECTURES "${architectures}"
    CUDA_VISIBILITY_PRESET hidden
    POSITION_INDEPENDENT_CODE ON)
  # Not CUDA_STANDARD: CMake before 3.26 does not know how newer compilers spell it.
  target_compile_options(${name} PRIVATE -std=c++20)
  # A third of the size. Drivers before CUDA 12.4 cannot read it; those of 13.0 are newer.
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13.0)
    target_compile_options(${name} PRIVATE --compress-mode=size)
  endif()
  target_include_directories(${name} PRIVATE
    "${PROJECT_SOURCE_DIR}" "${PROJECT_SOURCE_DIR}/src" "${PROJECT_SOURCE_DIR}/include" "${PROJECT_BINARY_DIR}/include")
endfunction()

# Hopper's own instructions, and what runs on every device from compute capability 8.0 on (as PTX for
# those that came later).
minference_add_cuda_objects(minference_cuda_sm90 "90a-real"
  src/attention/cuda/sm90_attention.cu)
# One source for both, with Hopper's products where it has them.
minference_add_cuda_objects(minference_cuda_both "80;90a-real"
  src/index/cuda/cell_scores.cu
  src/index/cuda/last_q.cu)
minference_add_cuda_objects(minference_cuda_any "80;90-real"
  src/attention/cuda/f32_attention.cu
  src/attention/cuda/gather_columns.cu
  src/attention/cuda/send.cu
  src/attention/cuda/sm80_attention.cu
  src/guard/cuda/recall.cu
  src/index/cuda/antidiagonal.cu
  src/index/cuda/block_bits.cu
  src/index/cuda/class_sums.cu
  src/index/cuda/coverage.cu
  src/index/cuda/coverage_index.cu
  src/index/cuda/coverings.cu
  src/index/cuda/flexprefill.cu
  src/index/cuda/head_plan.cu
  src/index/cuda/last_rows.cu
  src/index/cuda/modality_grid.cu
  src/index/cuda/modality_index.cu
  src/index/cuda/modality_sets.cu
  src/index/cuda/pattern_index.cu
  src/index/cuda/pooled.cu
  src/index/cuda/pooled_map.cu
  src/index/cuda/pooled_scores.cu)

# What tests of the kernels link as well: everything but the library's entry.
add_library(minference_cuda_kernels STATIC
  src/attention/cuda/check.cc
  src/attention/cuda/device_kernels.cc
  src/attention/cuda/head_parts.cc
  src/attention/cuda/host_index.cc
  src/attention/cuda/tensor_map.cc
  src/attention/cuda/workspace.cc
  src/index/cuda/antidiagonal_index.cc
  src/index/cuda/block_sparse_index.cc
  src/index/cuda/box_costs.cc
  src/index/cuda/check_problem.cc
  src/index/cuda/flexprefill_index.cc
  src/index/cuda/last_q_plan.cc
  src/index/cuda/row_pass_plan.cc
  $<TARGET_OBJECTS:minference_cuda_sm90>
  $<TARGET_OBJECTS:minference_cuda_both>
  $<TARGET_OBJECTS:minference_cuda_any>)
set_target_properties(minference_cuda_kernels PROPERTIES
  CXX_EXTENSIONS OFF POSITION_INDEPENDENT_CODE ON
  CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
target_include_directories(minference_cuda_kernels PUBLIC "${PROJECT_SOURCE_DIR}/src")
target_link_libraries(minference_cuda_kernels PUBLIC minference CUDA::cudart_static
                      PRIVATE minference_warnings)

add_library(minference_cuda SHARED src/attention/cuda/backend.cc)
set_target_properties(minference_cuda PROPERTIES
  CXX_EXTENSIONS OFF CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
target_link_libraries(minference_cuda PRIVATE minference_cuda_kernels minference_warnings)
# Nothing of the runtime or the core may leak into a process that has its own.
target_link_options(minference_cuda PRIVATE "LINKER:--exclude-libs,ALL" "LINKER:-Bsymbolic")
