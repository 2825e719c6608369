# A library of the modules that need gRPC: parameter_server/grpc_service and cluster/etcd. Their messages.proto are compiled by protoc.
lockstep_sources(PLUGIN_SOURCES lockstep_grpc)
set(generated ${PROJECT_BINARY_DIR}/generated)
foreach(module ${MODULES_OF_lockstep_grpc})
  set(messages ${generated}/${module}/messages.pb)
  set(proto ${PROJECT_SOURCE_DIR}/src/${module}/messages.proto)
  add_custom_command(OUTPUT ${messages}.cc ${messages}.h
    COMMAND ${CMAKE_COMMAND} -E make_directory ${generated}
    COMMAND ${PROTOC} -I${PROJECT_SOURCE_DIR}/src --cpp_out=${generated} ${proto}
    DEPENDS ${proto} VERBATIM)
  set_source_files_properties(${messages}.cc PROPERTIES COMPILE_OPTIONS -w SKIP_UNITY_BUILD_INCLUSION ON)
  list(APPEND PLUGIN_SOURCES ${messages}.cc)
endforeach()

add_library(lockstep_grpc_objects OBJECT ${PLUGIN_SOURCES})
lockstep_settings(lockstep_grpc_objects)
target_include_directories(lockstep_grpc_objects PRIVATE ${generated})

if(LOCKSTEP_WITH_TORCH)
  add_library(lockstep_grpc MODULE $<TARGET_OBJECTS:lockstep_grpc_objects>)
  set_target_properties(lockstep_grpc PROPERTIES PREFIX lib BUILD_RPATH ${PROJECT_BINARY_DIR} INSTALL_RPATH $ORIGIN)
  add_dependencies(lockstep_grpc lockstep_servers)
  target_link_libraries(lockstep_grpc PRIVATE $<TARGET_LINKER_FILE:lockstep_servers> $<TARGET_LINKER_FILE:lockstep> ${GRPC_LIBRARIES} ${SODIUM_LIBRARY} OpenSSL::Crypto)
endif()

if(NOT LOCKSTEP_SANITIZE STREQUAL "thread")  # which does not see how gRPC and Abseil synchronize, and stands still in them
  foreach(module ${MODULES_OF_lockstep_grpc})
    lockstep_files(tests ${module} *_test.cc)
    get_filename_component(name ${module} NAME)
    lockstep_test(${name}_test lockstep_parameter_server ${tests} $<TARGET_OBJECTS:lockstep_grpc_objects>)
    target_include_directories(${name}_test PRIVATE ${generated})
    target_link_libraries(${name}_test PRIVATE ${GRPC_LIBRARIES} OpenSSL::Crypto)
    add_dependencies(${name}_test lockstep_grpc_objects)
  endforeach()
  target_compile_definitions(grpc_service_test PRIVATE LOCKSTEP_CLI="$<TARGET_FILE:lockstep_cli>")
  add_dependencies(grpc_service_test lockstep_cli)
endif()
