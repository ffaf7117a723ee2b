# Installs the build into a fresh prefix, moves the prefix, and builds and runs a consumer against it.
cmake_minimum_required(VERSION 3.25)

function(run)
  execute_process(COMMAND ${ARGN} COMMAND_ECHO STDOUT COMMAND_ERROR_IS_FATAL ANY)
endfunction()

file(REMOVE_RECURSE "${work_dir}")
run("${CMAKE_COMMAND}" --install "${build_dir}" --prefix "${work_dir}/first")
# Whatever was installed with an absolute path no longer finds itself.
file(RENAME "${work_dir}/first" "${work_dir}/prefix")

run("${CMAKE_COMMAND}" -S "${source_dir}" -B "${work_dir}/build" -G "${generator}"
    "-DCMAKE_CXX_COMPILER=${compiler}" "-DCMAKE_PREFIX_PATH=${work_dir}/prefix"
    "-Dminference_expected_version=${version}")
run("${CMAKE_COMMAND}" --build "${work_dir}/build")
execute_process(COMMAND "${work_dir}/build/consumer" OUTPUT_VARIABLE said COMMAND_ERROR_IS_FATAL ANY)
message(STATUS "${said}")
# The kernels were found, whether this machine has a device or not.
if(with_cuda AND said MATCHES "no CUDA kernels")
  message(FATAL_ERROR "The consumer does not find the installed libminference_cuda.so.")
endif()

if(with_programs)
  run("${work_dir}/prefix/bin/minference" --version)
endif()
