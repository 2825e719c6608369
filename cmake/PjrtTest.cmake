# The modules pjrt and tpu are tested on the plugin for CPUs, and pjrt on two libraries that look like
# plugins.
foreach(test pjrt_test tpu_test)
  if(TARGET ${test})
    target_include_directories(${test} SYSTEM PRIVATE ${PJRT_INCLUDE_DIR})
    target_compile_definitions(${test} PRIVATE CPU_PLUGIN="${PJRT_CPU_PLUGIN}")
  endif()
endforeach()
foreach(fake "silent 0" "other 7")
  separate_arguments(fake)
  list(GET fake 0 name)
  list(GET fake 1 major)
  add_library(${name}_pjrt_plugin MODULE tests/fake_pjrt_plugin.cc)
  set_target_properties(${name}_pjrt_plugin PROPERTIES PREFIX "")
  target_include_directories(${name}_pjrt_plugin SYSTEM PRIVATE ${PJRT_INCLUDE_DIR})
  lockstep_settings(${name}_pjrt_plugin)
  target_compile_definitions(${name}_pjrt_plugin PRIVATE FAKE_MAJOR=${major})
  add_dependencies(pjrt_test ${name}_pjrt_plugin)
endforeach()
target_compile_definitions(pjrt_test PRIVATE
  SILENT_PLUGIN="$<TARGET_FILE:silent_pjrt_plugin>" OTHER_PLUGIN="$<TARGET_FILE:other_pjrt_plugin>")

# For chips that are not here.
if(PJRT_TPU_PLUGIN)
  lockstep_test(topology_test lockstep_core tests/topology_test.cc)
  target_include_directories(topology_test SYSTEM PRIVATE ${PJRT_INCLUDE_DIR})
  target_compile_definitions(topology_test PRIVATE TPU_PLUGIN="${PJRT_TPU_PLUGIN}")
  set_property(TEST topology_test APPEND PROPERTY ENVIRONMENT
    "TPU_SKIP_MDS_QUERY=1;TPU_WORKER_HOSTNAMES=localhost;TPU_WORKER_ID=0;TPU_ACCELERATOR_TYPE=v5litepod-4")
endif()
