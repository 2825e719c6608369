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

# Plugins made of the one for CPUs: one with faults, and a pod of several hosts.
foreach(kind "failing tpu_faults_test FAILING_PLUGIN" "pod tpu_pod_test POD_PLUGIN")
  separate_arguments(kind)
  list(GET kind 0 name)
  list(GET kind 1 test)
  list(GET kind 2 variable)
  if(TARGET ${test})
    add_library(${name}_pjrt_plugin MODULE tests/${name}_pjrt_plugin.cc)
    set_target_properties(${name}_pjrt_plugin PROPERTIES PREFIX "")
    target_include_directories(${name}_pjrt_plugin SYSTEM PRIVATE ${PJRT_INCLUDE_DIR})
    lockstep_settings(${name}_pjrt_plugin)
    target_compile_definitions(${name}_pjrt_plugin PRIVATE CPU_PLUGIN="${PJRT_CPU_PLUGIN}")
    add_dependencies(${test} ${name}_pjrt_plugin)
    target_compile_definitions(${test} PRIVATE ${variable}="$<TARGET_FILE:${name}_pjrt_plugin>")
  endif()
endforeach()

# These compile for chips that are not here.
if(PJRT_TPU_PLUGIN)
  lockstep_test(topology_test lockstep_pjrt tests/topology_test.cc)
  target_include_directories(topology_test SYSTEM PRIVATE ${PJRT_INCLUDE_DIR})
  target_compile_definitions(topology_test PRIVATE TPU_PLUGIN="${PJRT_TPU_PLUGIN}")
  set_property(TEST topology_test APPEND PROPERTY ENVIRONMENT
    "TPU_SKIP_MDS_QUERY=1;TPU_WORKER_HOSTNAMES=localhost;TPU_WORKER_ID=0;TPU_ACCELERATOR_TYPE=v5litepod-4")
  set_property(TEST topology_test PROPERTY RESOURCE_LOCK libtpu)
endif()
if(PJRT_TPU_PLUGIN AND TARGET train_step)
  # compiled_for(NAME CHIPS SAYS STATUS program...): what `lockstep compile-for` says, and its exit status. One process at a
  # time uses libtpu.
  function(compiled_for name chips says status program)
    add_test(NAME ${name} COMMAND sh -c "$<TARGET_FILE:lockstep_cli> compile-for ${chips} ${program} 2>&1; echo status $?")
    set_tests_properties(${name} PROPERTIES TIMEOUT 1200 RESOURCE_LOCK libtpu
      ENVIRONMENT PJRT_PLUGIN_LIBRARY_PATH=${PJRT_TPU_PLUGIN} PASS_REGULAR_EXPRESSION "${says}.*status ${status}")
  endfunction()
  # README's program and a transformer, on one host's chips and on those of several (v5e:4x4).
  foreach(replicas_on "8 replicas on v5e:2x4" "4 replicas on v4:2x2x1" "8 replicas on v6e:2x4" "16 replicas on v5e:4x4")
    string(REGEX MATCH "[^ ]+$" chips ${replicas_on})
    set(fits "the training step for ${replicas_on} .* GFLOP a device. fits into [0-9.]+ GiB")
    compiled_for(compile_mnist_for_${chips} ${chips} "${fits}" 0 "$<TARGET_FILE:mnist> --strategy tpu")
    compiled_for(compile_transformer_for_${chips} ${chips} "${fits}" 0
      "$<TARGET_FILE:train_step> --device tpu --model transformer")
  endforeach()
  compiled_for(compile_what_does_not_fit v5e:2x2
    "the training step for 4 replicas on v5e:2x2: does not fit, or cannot be compiled: .*Ran out of memory on HBM" 1
    "$<TARGET_FILE:train_step> --device tpu --model seed_cnn --batch 400000")
endif()
