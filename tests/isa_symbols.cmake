# No ISA body may export an inline function: the linker keeps one copy of such a function for the
# whole program, and if that is the one compiled with wider instructions, baseline code crashes on
# a processor without them.
# Input: nm, objects (a list of object files), levels (instruction set levels, joined by |)
cmake_minimum_required(VERSION 3.25)

set(checked 0)
foreach(object IN LISTS objects)
  if(object MATCHES "_(${levels})\\.cc\\.o$")
    execute_process(COMMAND "${nm}" --demangle --defined-only "${object}"
                    OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
    string(REGEX MATCHALL "[^\n]* [WwVvu] [^\n]*" leaked "${symbols}")
    if(leaked)
      list(JOIN leaked "\n" leaked)
      message(FATAL_ERROR "${object} exports inline functions:\n${leaked}")
    endif()
    math(EXPR checked "${checked} + 1")
  endif()
endforeach()
if(checked EQUAL 0)
  message(FATAL_ERROR "no ISA bodies among: ${objects}")
endif()
message(STATUS "${checked} ISA bodies checked")
