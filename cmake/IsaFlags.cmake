# The one registry of instruction set levels. Everything compiles at the compiler's baseline,
# except the ISA bodies: each is one small source file with the flags of its level, and is only
# entered after run-time detection. tests/isa_symbols.cmake checks that nothing leaks out of them.
include_guard(GLOBAL)

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set(MINFERENCE_ISA_LEVELS generic avx2 avx512 avx512_bf16 amx_bf16)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$" AND CMAKE_SYSTEM_NAME STREQUAL "Linux")
  set(MINFERENCE_ISA_LEVELS generic neon neon_bf16)
else()
  set(MINFERENCE_ISA_LEVELS generic)
endif()

set(minference_isa_flags_generic "")
set(minference_isa_flags_avx2 -mavx2 -mfma -mf16c)
set(minference_isa_flags_avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c)
set(minference_isa_flags_avx512_bf16 ${minference_isa_flags_avx512} -mavx512bf16)
set(minference_isa_flags_amx_bf16 ${minference_isa_flags_avx512_bf16} -mamx-tile -mamx-bf16)
set(minference_isa_flags_neon "")  # the baseline of aarch64 has it
set(minference_isa_flags_neon_bf16 -march=armv8.2-a+bf16)

# GCC 12's AVX-512 headers trip over their own _mm512_undefined_*() (GCC bug 105593).
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  foreach(level IN ITEMS avx512 avx512_bf16 amx_bf16)
    list(APPEND minference_isa_flags_${level} -Wno-uninitialized -Wno-maybe-uninitialized)
  endforeach()
endif()

# GCC 12 for aarch64 reuses vectors of earlier iterations although stores since then overlap them in
# part (predictive commoning): add_sums() would lose terms.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
  foreach(level IN LISTS MINFERENCE_ISA_LEVELS)
    list(APPEND minference_isa_flags_${level} -fno-predictive-commoning)
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
