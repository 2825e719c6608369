# The two commands of the README, and what continuous integration adds. Everything else is CMake: see CMakePresets.json.
.PHONY: train test lint sanitize clean

BUILD = cmake --build --preset

# Trains the program of examples/mnist.cc on Fashion-MNIST.
train: build/release/build.ninja
	tools/bootstrap
	$(BUILD) release --target mnist
	build/release/examples/mnist

# Builds everything and runs every test.
test: build/release/build.ninja
	tools/bootstrap --test
	$(BUILD) release
	ctest --preset release

# Format, direction of includes, lengths, thread-safety annotations.
lint:
	tools/bootstrap --lint
	tools/lint

# The rooms without torch under the address, undefined-behaviour and thread sanitizers.
sanitize:
	tools/bootstrap
	for preset in asan tsan; do cmake --preset $$preset && $(BUILD) $$preset && ctest --preset $$preset || exit 1; done

build/release/build.ninja:
	tools/bootstrap
	cmake --preset release

clean:
	rm -rf build
