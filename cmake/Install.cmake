# What `cmake --install` leaves:
#   include/minference, lib/libminference.a, lib/cmake/minference   the library, for find_package
#   lib/minference/                                                the command line, the plug-in,
#                                                                  llama.cpp's tools and libraries,
#                                                                  the CUDA kernels, and patterns/
#   bin/minference -> lib/minference/minference
# The programs keep a folder of their own, laid out as build/<preset>/bin is: ggml looks for its
# modules beside the executable, and a llama.cpp that the user already has in the same prefix is not
# overwritten.
include_guard(GLOBAL)
include(CMakePackageConfigHelpers)

set(minference_cmake_dir "${CMAKE_INSTALL_LIBDIR}/cmake/minference")
set(minference_program_dir "${CMAKE_INSTALL_LIBDIR}/minference")

install(TARGETS minference EXPORT minference-targets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/minference" "${PROJECT_BINARY_DIR}/include/minference"
        DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
install(EXPORT minference-targets NAMESPACE minference:: DESTINATION ${minference_cmake_dir})

configure_package_config_file(
  "${PROJECT_SOURCE_DIR}/cmake/minference-config.cmake.in"
  "${PROJECT_BINARY_DIR}/minference-config.cmake"
  INSTALL_DESTINATION ${minference_cmake_dir}
  PATH_VARS minference_program_dir)
# Before 1.0 a minor version may change the interface.
write_basic_package_version_file(
  "${PROJECT_BINARY_DIR}/minference-config-version.cmake" COMPATIBILITY SameMinorVersion)
install(FILES
  "${PROJECT_BINARY_DIR}/minference-config.cmake"
  "${PROJECT_BINARY_DIR}/minference-config-version.cmake"
  DESTINATION ${minference_cmake_dir})
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION ${CMAKE_INSTALL_DOCDIR})

if(MINFERENCE_CUDA)
  # OPTIONAL: make build leaves it out.
  install(TARGETS minference_cuda LIBRARY DESTINATION ${minference_program_dir} OPTIONAL)
endif()

if(MINFERENCE_LLAMA)
  install(TARGETS minference-cli ggml-minference
          RUNTIME DESTINATION ${minference_program_dir}
          LIBRARY DESTINATION ${minference_program_dir})
  install(DIRECTORY "${PROJECT_SOURCE_DIR}/patterns" DESTINATION ${minference_program_dir}
          FILES_MATCHING PATTERN "*.json")
  install(CODE "
    file(MAKE_DIRECTORY \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_BINDIR}\")
    file(RELATIVE_PATH target \"/${CMAKE_INSTALL_BINDIR}\" \"/${minference_program_dir}/minference\")
    file(CREATE_LINK \"\${target}\"
         \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_BINDIR}/minference\" SYMBOLIC)")
  if(MINFERENCE_LLAMA_LIBRARIES)
    # llama.cpp's development files are its own installation's business.
    set_target_properties(${MINFERENCE_LLAMA_LIBRARIES} PROPERTIES PUBLIC_HEADER "" PRIVATE_HEADER "")
    # OPTIONAL: the tools may not have been built (make build leaves them out).
    install(TARGETS ${MINFERENCE_LLAMA_LIBRARIES} ggml-cpu ${MINFERENCE_LLAMA_TOOLS}
            RUNTIME DESTINATION ${minference_program_dir} OPTIONAL
            LIBRARY DESTINATION ${minference_program_dir} OPTIONAL NAMELINK_SKIP)
  endif()
endif()
