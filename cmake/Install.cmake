# `cmake --install`: the library, its headers, the command, and what find_package(Lockstep) reads.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# Not all that is installed is built by every target: `make train` builds no command. Where all is built this does nothing.
set(installed lockstep_cli)
if(LOCKSTEP_WITH_TORCH)
  list(APPEND installed lockstep)
  if(GRPC_FOUND)
    list(APPEND installed lockstep_grpc)
  endif()
endif()
list(JOIN installed " " installed)
install(CODE "
execute_process(COMMAND \"${CMAKE_COMMAND}\" --build \"${PROJECT_BINARY_DIR}\" --target ${installed} RESULT_VARIABLE failed)
if(failed)
  message(FATAL_ERROR \"${installed} cannot be built, and so not installed\")
endif()")

install(TARGETS lockstep_cli DESTINATION ${CMAKE_INSTALL_BINDIR})
if(LOCKSTEP_WITH_TORCH)
  set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/Lockstep)
  target_include_directories(lockstep PUBLIC $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  target_compile_features(lockstep PUBLIC cxx_std_20)
  install(TARGETS lockstep EXPORT LockstepTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
  if(GRPC_FOUND)
    install(TARGETS lockstep_grpc LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
  endif()
  install(EXPORT LockstepTargets NAMESPACE Lockstep:: DESTINATION ${package_folder})
  install(DIRECTORY include/lockstep DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
  configure_package_config_file(cmake/LockstepConfig.cmake.in ${PROJECT_BINARY_DIR}/LockstepConfig.cmake
    INSTALL_DESTINATION ${package_folder})
  write_basic_package_version_file(${PROJECT_BINARY_DIR}/LockstepConfigVersion.cmake COMPATIBILITY SameMinorVersion)
  install(FILES ${PROJECT_BINARY_DIR}/LockstepConfig.cmake ${PROJECT_BINARY_DIR}/LockstepConfigVersion.cmake
    cmake/FindLibTorch.cmake DESTINATION ${package_folder})
endif()
