# The module grpc_service: messages.proto is compiled by protoc; the rest is linked with the library that loads it.
lockstep_modules(PLUGIN_MODULES plugin)
lockstep_sources(PLUGIN_SOURCES ${PLUGIN_MODULES})
set(generated ${PROJECT_BINARY_DIR}/generated)
set(messages ${generated}/grpc_service/messages.pb)
add_custom_command(OUTPUT ${messages}.cc ${messages}.h
  COMMAND ${CMAKE_COMMAND} -E make_directory ${generated}
  COMMAND ${PROTOC} -I${PROJECT_SOURCE_DIR}/src --cpp_out=${generated} ${PROJECT_SOURCE_DIR}/src/grpc_service/messages.proto
  DEPENDS ${PROJECT_SOURCE_DIR}/src/grpc_service/messages.proto VERBATIM)
set_source_files_properties(${messages}.cc PROPERTIES COMPILE_OPTIONS -w SKIP_UNITY_BUILD_INCLUSION ON)

add_library(lockstep_grpc_objects OBJECT ${PLUGIN_SOURCES} ${messages}.cc)
lockstep_settings(lockstep_grpc_objects)
target_include_directories(lockstep_grpc_objects PRIVATE ${generated})

if(LOCKSTEP_WITH_TORCH)
  add_library(lockstep_grpc MODULE $<TARGET_OBJECTS:lockstep_grpc_objects>)
  set_target_properties(lockstep_grpc PROPERTIES PREFIX lib BUILD_RPATH ${PROJECT_BINARY_DIR} INSTALL_RPATH $ORIGIN)
  add_dependencies(lockstep_grpc lockstep)
  target_link_libraries(lockstep_grpc PRIVATE $<TARGET_LINKER_FILE:lockstep> ${GRPC_LIBRARIES} ${SODIUM_LIBRARY} OpenSSL::Crypto)
endif()

if(NOT LOCKSTEP_SANITIZE STREQUAL "thread")  # which does not see how gRPC and Abseil synchronize, and stands still in them
  file(GLOB tests CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/grpc_service/*_test.cc)
  lockstep_test(grpc_service_test lockstep_core ${tests} $<TARGET_OBJECTS:lockstep_grpc_objects>)
  target_include_directories(grpc_service_test PRIVATE ${generated})
  target_link_libraries(grpc_service_test PRIVATE ${GRPC_LIBRARIES} OpenSSL::Crypto)
  target_compile_definitions(grpc_service_test PRIVATE LOCKSTEP_CLI="$<TARGET_FILE:lockstep_cli>")
  add_dependencies(grpc_service_test lockstep_grpc_objects lockstep_cli)
endif()
