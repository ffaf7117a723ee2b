# minference_bench: the benchmarks as a library, for `minference bench` and for the programs here.
# A file to include and not a folder to add, because the command line needs it with
# MINFERENCE_BENCH=OFF as well.
include_guard(GLOBAL)

find_package(CLI11 2.1 REQUIRED)

set(bench_dir "${CMAKE_CURRENT_LIST_DIR}")
add_library(minference_bench STATIC
  "${bench_dir}/attention.cc"
  "${bench_dir}/attention_problem.cc"
  "${bench_dir}/index_cost.cc"
  "${bench_dir}/options.cc"
  "${bench_dir}/report.cc"
  "${bench_dir}/sparse_shapes.cc")
set_target_properties(minference_bench PROPERTIES CXX_EXTENSIONS OFF)
target_include_directories(minference_bench PUBLIC "${PROJECT_SOURCE_DIR}" "${PROJECT_SOURCE_DIR}/src")
target_link_libraries(minference_bench
  PUBLIC minference nlohmann_json::nlohmann_json CLI11::CLI11
  PRIVATE minference_warnings)
if(MINFERENCE_OPENMP)
  target_link_libraries(minference_bench PRIVATE OpenMP::OpenMP_CXX)
else()
  target_link_libraries(minference_bench PRIVATE Threads::Threads)
endif()
if(MINFERENCE_LLAMA)
  # ggml's own kernels as the peer; without llama.cpp only our attention is measured.
  target_sources(minference_bench PRIVATE
    "${bench_dir}/ggml_peer.cc"
    "${bench_dir}/linear.cc"
    "${PROJECT_SOURCE_DIR}/src/llama/ggml_weight.cc")
  target_compile_definitions(minference_bench PRIVATE MINFERENCE_BENCH_GGML)
  target_link_libraries(minference_bench PUBLIC ggml)
endif()
