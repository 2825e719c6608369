# Finds gRPC for C++ with protobuf and its compiler: Debian's libgrpc++-dev, libprotobuf-dev and protobuf-compiler.
# Defines GRPC_LIBRARIES and PROTOC.
find_program(PROTOC protoc)
find_path(GRPC_INCLUDE_DIR grpcpp/grpcpp.h)
find_path(PROTOBUF_INCLUDE_DIR google/protobuf/message_lite.h)
set(_libraries)
set(GRPC_LIBRARIES)
foreach(_name grpc++ grpc gpr protobuf absl_synchronization)
  find_library(GRPC_${_name}_LIBRARY ${_name})
  list(APPEND _libraries GRPC_${_name}_LIBRARY)
  list(APPEND GRPC_LIBRARIES ${GRPC_${_name}_LIBRARY})
endforeach()
if(GRPC_INCLUDE_DIR)
  file(STRINGS ${GRPC_INCLUDE_DIR}/grpcpp/version_info.h GRPC_VERSION REGEX "GRPC_CPP_VERSION_STRING")
  string(REGEX REPLACE ".*\"([0-9.]+).*" "\\1" GRPC_VERSION "${GRPC_VERSION}")
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(GRPC REQUIRED_VARS PROTOC GRPC_INCLUDE_DIR PROTOBUF_INCLUDE_DIR ${_libraries} VERSION_VAR GRPC_VERSION
  REASON_FAILURE_MESSAGE "ParameterServerStrategy needs it: install libgrpc++-dev, libprotobuf-dev and protobuf-compiler, or leave it out with -DLOCKSTEP_GRPC=OFF")
