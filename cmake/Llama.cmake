# llama.cpp for the plug-in, the engine and the tools. Three sources, in this order:
#   MINFERENCE_USE_SYSTEM_LLAMA=ON    an installed llama.cpp, through find_package(llama)
#   MINFERENCE_LLAMA_SOURCE_DIR=path  a source tree of your own
#   default                           the pinned sources, fetched and hash-checked by scripts/fetch.py
#
# Defines for the rest of the build:
#   targets llama, llama-common, ggml, ggml-base
#   MINFERENCE_GGML_VERSION              the ggml version that the plug-in is compiled against
#   MINFERENCE_GGML_PRIVATE_INCLUDE_DIR  folder of ggml-backend-impl.h, which ggml does not install
#   MINFERENCE_LLAMA_TOOLS               the tools that were configured (empty with a system llama.cpp)
#   MINFERENCE_LLAMA_LIBRARIES           the shared libraries that they need
include_guard(GLOBAL)

option(MINFERENCE_USE_SYSTEM_LLAMA "Use an installed llama.cpp through find_package(llama)" OFF)
set(MINFERENCE_LLAMA_SOURCE_DIR "" CACHE PATH
    "llama.cpp source tree (default: the pinned one, fetched into the cache)")

function(minference_fetch_llama out_dir)
  find_package(Python3 REQUIRED COMPONENTS Interpreter)
  execute_process(
    COMMAND "${Python3_EXECUTABLE}" "${PROJECT_SOURCE_DIR}/scripts/fetch.py" llama
    OUTPUT_VARIABLE directory OUTPUT_STRIP_TRAILING_WHITESPACE
    RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR
      "The llama.cpp sources could not be fetched (see the line above). Give a source tree with "
      "-DMINFERENCE_LLAMA_SOURCE_DIR=path, or build without llama.cpp: -DMINFERENCE_LLAMA=OFF.")
  endif()
  set(${out_dir} "${directory}" PARENT_SCOPE)
endfunction()

# Sets the GGML_* instruction set options to what the build machine has. GGML_NATIVE would do that,
# but ggml refuses it together with GGML_BACKEND_DL. Options given on the command line win.
macro(minference_set_ggml_isa)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$" AND EXISTS "/proc/cpuinfo")
    file(STRINGS "/proc/cpuinfo" cpu_flags REGEX "^flags" LIMIT_COUNT 1)
    # option, flags of /proc/cpuinfo that all must be there
    foreach(entry IN ITEMS
        "SSE42,sse4_2" "AVX,avx" "AVX2,avx2" "BMI2,bmi2" "FMA,fma" "F16C,f16c"
        "AVX_VNNI,avx_vnni"
        "AVX512,avx512f,avx512cd,avx512vl,avx512dq,avx512bw"
        "AVX512_VBMI,avx512vbmi" "AVX512_VNNI,avx512_vnni" "AVX512_BF16,avx512_bf16"
        "AMX_TILE,amx_tile" "AMX_INT8,amx_int8" "AMX_BF16,amx_bf16")
      string(REPLACE "," ";" needed "${entry}")
      list(POP_FRONT needed feature)
      set(present ON)
      foreach(flag IN LISTS needed)
        if(NOT "${cpu_flags} " MATCHES " ${flag} ")
          set(present OFF)
        endif()
      endforeach()
      # GCC before 13.3 miscompiles the AMX tile configuration: _tile_loadconfig declares only the
      # first 8 bytes of the 64-byte structure as its input, so the stores to the rest are deleted
      # and the first tile instruction raises SIGILL. Clang and later GCC are right.
      if(present AND feature MATCHES "^AMX" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU"
         AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13.3)
        set(present OFF)
        if(feature STREQUAL "AMX_TILE")
          message(STATUS "ggml: AMX off, GCC ${CMAKE_CXX_COMPILER_VERSION} miscompiles its tile "
                         "configuration (needs GCC 13.3 or clang)")
        endif()
      endif()
      if(NOT DEFINED GGML_${feature})
        set(GGML_${feature} ${present})
      endif()
      if(GGML_${feature})
        list(APPEND ggml_isa ${feature})
      endif()
    endforeach()
    list(JOIN ggml_isa " " ggml_isa)
    message(STATUS "ggml: instruction sets of this machine: ${ggml_isa}")
  endif()
endmacro()

# A function, so that the variables that steer llama.cpp's build stay out of ours.
function(minference_add_llama source_dir)
  set(BUILD_SHARED_LIBS ON)
  set(CMAKE_CXX_STANDARD 17)
  # Nobody debugs ggml from here, and an unoptimised ggml takes minutes for one prompt.
  set(CMAKE_C_FLAGS_DEBUG "${CMAKE_C_FLAGS_RELEASE}")
  set(CMAKE_CXX_FLAGS_DEBUG "${CMAKE_CXX_FLAGS_RELEASE}")

  set(LLAMA_BUILD_NUMBER 0)
  set(LLAMA_BUILD_COMMIT "pinned")
  set(LLAMA_ALL_WARNINGS OFF)
  set(LLAMA_BUILD_COMMON ON)
  set(LLAMA_BUILD_TOOLS ON)
  set(LLAMA_BUILD_SERVER ON)
  set(LLAMA_BUILD_TESTS OFF)
  set(LLAMA_BUILD_EXAMPLES OFF)
  set(LLAMA_BUILD_APP OFF)
  # These three keep the build off the network.
  set(LLAMA_BUILD_UI OFF)
  set(LLAMA_USE_PREBUILT_UI OFF)
  set(LLAMA_OPENSSL OFF)

  set(GGML_CCACHE OFF)  # ours is set as the compiler launcher
  set(GGML_NATIVE OFF)
  set(GGML_LLAMAFILE ON)
  set(GGML_OPENMP ON)   # one OpenMP runtime for ggml's threads and ours
  # Backends as loadable modules: only then does every llama.cpp tool honour GGML_BACKEND_PATH.
  set(GGML_BACKEND_DL ON)
  minference_set_ggml_isa()

  # SYSTEM: our warnings do not judge its headers.
  add_subdirectory("${source_dir}" "${PROJECT_BINARY_DIR}/llama.cpp" EXCLUDE_FROM_ALL SYSTEM)

  get_directory_property(version DIRECTORY "${source_dir}/ggml" DEFINITION GGML_VERSION)
  if(NOT version)
    message(FATAL_ERROR "${source_dir}: ggml does not define GGML_VERSION")
  endif()
  # Without llamafile's kernels ggml's matrix products are several times slower, which would make
  # every comparison with stock llama.cpp a lie.
  get_target_property(definitions ggml-cpu COMPILE_DEFINITIONS)
  if(NOT "GGML_USE_LLAMAFILE" IN_LIST definitions)
    message(FATAL_ERROR "ggml-cpu was configured without GGML_LLAMAFILE")
  endif()
  set(MINFERENCE_GGML_VERSION "${version}" PARENT_SCOPE)
endfunction()

if(MINFERENCE_USE_SYSTEM_LLAMA)
  # What an installation leaves out comes from the sources of the same version: the private header
  # of the plug-in interface and the headers of llama-common.
  if(NOT MINFERENCE_LLAMA_SOURCE_DIR)
    message(FATAL_ERROR
      "MINFERENCE_USE_SYSTEM_LLAMA needs -DMINFERENCE_LLAMA_SOURCE_DIR=path as well: llama.cpp does "
      "not install ggml-backend-impl.h and common/*.h, which must be of the installed version.")
  endif()
  set(minference_llama_dir "${MINFERENCE_LLAMA_SOURCE_DIR}")
  find_package(llama REQUIRED)
  find_library(MINFERENCE_LLAMA_COMMON_LIBRARY llama-common HINTS "${LLAMA_LIB_DIR}" REQUIRED)
  file(STRINGS "${minference_llama_dir}/ggml/CMakeLists.txt" minference_source_version
       REGEX "^set\\(GGML_VERSION_(MAJOR|MINOR|PATCH) ")
  string(REGEX REPLACE "[^0-9;]" "" minference_source_version "${minference_source_version}")
  list(JOIN minference_source_version "." minference_source_version)
  if(NOT minference_source_version VERSION_EQUAL ggml_VERSION)
    message(FATAL_ERROR "The installed ggml is ${ggml_VERSION}, ${minference_llama_dir} has "
                        "${minference_source_version}: they must be the same version.")
  endif()
  add_library(llama-common UNKNOWN IMPORTED)
  set_target_properties(llama-common PROPERTIES
    IMPORTED_LOCATION "${MINFERENCE_LLAMA_COMMON_LIBRARY}"
    INTERFACE_INCLUDE_DIRECTORIES
      "${minference_llama_dir}/common;${minference_llama_dir}/vendor"
    INTERFACE_LINK_LIBRARIES llama)
  add_library(ggml ALIAS ggml::ggml)
  add_library(ggml-base ALIAS ggml::ggml-base)
  set(MINFERENCE_GGML_VERSION "${ggml_VERSION}")
  set(MINFERENCE_LLAMA_TOOLS "")
  set(MINFERENCE_LLAMA_LIBRARIES "")
  list(APPEND CMAKE_INSTALL_RPATH "${LLAMA_LIB_DIR}")
else()
  if(MINFERENCE_LLAMA_SOURCE_DIR)
    set(minference_llama_dir "${MINFERENCE_LLAMA_SOURCE_DIR}")
    if(NOT EXISTS "${minference_llama_dir}/ggml/src/ggml-backend-impl.h")
      message(FATAL_ERROR
        "MINFERENCE_LLAMA_SOURCE_DIR=${minference_llama_dir} is not a llama.cpp source tree")
    endif()
  else()
    minference_fetch_llama(minference_llama_dir)
  endif()
  minference_add_llama("${minference_llama_dir}")

  set(MINFERENCE_LLAMA_TOOLS
    llama-server llama-cli llama-bench llama-perplexity llama-quantize)
  set(MINFERENCE_LLAMA_LIBRARIES
    ggml-base ggml llama llama-common mtmd
    llama-server-impl llama-cli-impl llama-bench-impl llama-perplexity-impl llama-quantize-impl)
  add_custom_target(tools ALL)
  add_dependencies(tools ${MINFERENCE_LLAMA_TOOLS} ggml-cpu)
endif()

set(MINFERENCE_GGML_PRIVATE_INCLUDE_DIR "${minference_llama_dir}/ggml/src")
message(STATUS "llama.cpp: ${minference_llama_dir} (ggml ${MINFERENCE_GGML_VERSION})")
