# The one registry of instruction set levels. Everything compiles at the compiler's baseline,
# except the ISA bodies: each is one small source file with the flags of its level, and is only
# entered after run-time detection. tests/isa_symbols.cmake checks that nothing leaks out of them.
include_guard(GLOBAL)

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set(MINFERENCE_ISA_LEVELS generic avx2 avx512 avx512_bf16 amx_bf16)
else()
  set(MINFERENCE_ISA_LEVELS generic)
endif()

set(minference_isa_flags_generic "")
set(minference_isa_flags_avx2 -mavx2 -mfma -mf16c)
set(minference_isa_flags_avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c)
set(minference_isa_flags_avx512_bf16 ${minference_isa_flags_avx512} -mavx512bf16)
set(minference_isa_flags_amx_bf16 ${minference_isa_flags_avx512_bf16} -mamx-tile -mamx-bf16)

# GCC 12's AVX-512 headers trip over their own _mm512_undefined_*() (GCC bug 105593).
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  foreach(level IN ITEMS avx512 avx512_bf16 amx_bf16)
    list(APPEND minference_isa_flags_${level} -Wno-uninitialized -Wno-maybe-uninitialized)
  endforeach()
endif()

# minference_add_isa_source(<level> <file>)
#
# Adds a source file, compiled for a level, to the library. A level that the target processor
# does not know is skipped; code that dispatches asks for MINFERENCE_HAVE_ISA_<LEVEL>.
function(minference_add_isa_source level file)
  if(NOT DEFINED minference_isa_flags_${level})
    message(FATAL_ERROR "minference_add_isa_source: unknown level '${level}'")
  endif()
  if(NOT level IN_LIST MINFERENCE_ISA_LEVELS)
    return()
  endif()
  target_sources(minference PRIVATE "${file}")
  set_property(SOURCE "${file}" APPEND PROPERTY COMPILE_OPTIONS ${minference_isa_flags_${level}})
  string(TOUPPER "MINFERENCE_HAVE_ISA_${level}" have)
  set_property(TARGET minference APPEND PROPERTY COMPILE_DEFINITIONS "${have}=1")
endfunction()
