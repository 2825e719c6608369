# The two commands of the README, and what continuous integration adds. Everything else is CMake: see CMakePresets.json.
.PHONY: train quick test test-full lint sanitize sanitize-torch fuzz bench-peers bench-step bench-collectives bench-workers bench-ps bench-parallel bench-plan bench-tpu faults clean

BUILD = cmake --build --preset

# Trains the program of examples/mnist.cc on Fashion-MNIST.
train: build/release/build.ninja
	tools/bootstrap
	$(BUILD) release --target mnist
	build/release/examples/mnist

# The three tiers of tests: modules, and jobs whose ranks are threads; also each launcher, and each mechanism that needs processes, once; and
# everything, with the benchmarks built.
quick test: build/release/build.ninja
	tools/bootstrap --test
	$(BUILD) release
	ctest --preset $@
test-full: build/release/build.ninja
	tools/bootstrap --test
	$(BUILD) release
	$(BUILD) release --target benchmarks
	ctest --preset full

# Format, direction of includes, lengths, thread-safety annotations.
lint:
	tools/bootstrap --lint
	tools/lint

# The address, undefined-behaviour and thread sanitizers, on the modules without torch; and on all, which takes half an hour.
sanitize: PRESETS = asan tsan
sanitize-torch: PRESETS = asan-torch tsan-torch
sanitize sanitize-torch:
	tools/bootstrap --test
	for preset in $(PRESETS); do cmake --preset $$preset && $(BUILD) $$preset && ctest --preset $$preset || exit 1; done

# What comes from outside (TF_CONFIG, node lists, hostfiles, bytes on a port, checkpoints), by libFuzzer under sanitizers, for some seconds each.
fuzz:
	tools/bootstrap --lint
	cmake --preset fuzz && $(BUILD) fuzz && ctest --preset fuzz

# A hundred seeded rounds of random faults each, of collectives and of parameter servers: about half an hour.
faults: build/release/build.ninja
	tools/bootstrap --test
	$(BUILD) release
	LOCKSTEP_FAULT_ROUNDS=100 build/release/tests/processes/faults_test --gtest_filter='RandomFaults.*'
	LOCKSTEP_FAULT_ROUNDS=100 build/release/tests/parameter_server_faults_test --gtest_filter='*RandomFaults*'
	LOCKSTEP_FAULT_ROUNDS=100 build/release/tests/elastic_fit_test --gtest_filter='*AtAnyMoment'
	LOCKSTEP_FAULT_ROUNDS=100 build/release/tests/elastic_fit_test --gtest_filter='*RegroupOrSave'
	LOCKSTEP_FAULT_ROUNDS=100 build/release/tests/elastic_loop_test --gtest_filter='*AtAnyMoment'
	LOCKSTEP_FAULT_ROUNDS=20 build/release/tests/elastic_mesh_test --gtest_filter='*AtAnyMoment*'
	python3 benchmarks/worker_loss.py --kills 50 --minutes 10
	LOCKSTEP_SEEDS=100000 build/release/elastic_test --gtest_filter='Sections.*'
	python3 tests/elastic_hosts_test.py $(CURDIR)/build/release/tests/elastic_fit_program $(CURDIR)/build/release/lockstep $(CURDIR) MoreFaults

# The libraries that benchmarks compare with, each in an environment of its own under .peers/.
bench-peers: .peers/tensorflow/done .peers/pytorch/done

.peers/tensorflow/done:
	tools/bootstrap
	python3 -m venv .peers/tensorflow && .peers/tensorflow/bin/pip install --quiet tensorflow-cpu==2.20.0 && touch $@
.peers/pytorch/done:
	tools/bootstrap
	python3 -m venv .peers/pytorch && .peers/pytorch/bin/pip install --quiet torch==2.11.0 numpy torchft==0.2.0 && touch $@

# Training steps, ours and the peers', in turns: a table, a line of JSON, and README's plot.
bench-step: build/release/build.ninja bench-peers
	$(BUILD) release --target train_step dataset fma_peak
	python3 benchmarks/bench_step.py --plot docs/step.svg

# Reductions between processes, ours and the peers', in turns: a table and a line of JSON.
bench-collectives: build/release/build.ninja bench-peers .peers/mpi/all_reduce
	$(BUILD) release --target lockstep_cli ddp_step
	python3 benchmarks/bench_collectives.py

# Training over workers, ours and the peers', in turns, on this machine and over hosts that are network namespaces.
bench-workers: build/release/build.ninja bench-peers
	$(BUILD) release --target lockstep_cli train_step elastic_fit_program checkpoint_pause
	python3 benchmarks/bench_workers.py
	python3 benchmarks/worker_loss.py
	build/release/benchmarks/checkpoint_pause build/checkpoint_pause

# Compiled steps on the plugin for CPUs, against JAX's.
bench-tpu: build/release/build.ninja
	test -x .peers/jax/bin/python || python3 -m venv .peers/jax
	.peers/jax/bin/pip install --quiet "jax[cpu]==0.10.2"
	$(BUILD) release --target train_step
	python3 benchmarks/bench_tpu.py

# Training with parameter servers, ours and TensorFlow's, in turns, what calls to a server carry, and how soon a killed server is back.
bench-ps: build/release/build.ninja bench-peers
	$(BUILD) release --target lockstep_grpc lockstep_cli train_step click_step server_calls
	python3 benchmarks/bench_ps.py
	python3 benchmarks/server_return.py

# Models that are split over processes, ours and PyTorch's, in turns.
bench-parallel: build/release/build.ninja bench-peers
	$(BUILD) release --target lockstep_cli parallel_step
	python3 benchmarks/bench_parallel.py

# What plan_parallel predicts for each split over two processes, and what it takes.
bench-plan: build/release/build.ninja
	$(BUILD) release --target lockstep_cli plan_step
	python3 benchmarks/bench_plan.py

.peers/mpi/all_reduce: benchmarks/peers/mpi_all_reduce.cc
	tools/bootstrap --bench
	mkdir -p $(@D) && mpicxx -O2 -std=c++20 $< -o $@

build/release/build.ninja:
	tools/bootstrap
	cmake --preset release

clean:
	rm -rf build
