// The command `lockstep`: arguments -> a call, nothing else.
#include <CLI/CLI.hpp>
#include <iostream>

#include "cli/commands.h"
#include "lockstep/error.h"

int main(int argc, char** argv) {
  CLI::App app("Lockstep: distributed training for LibTorch");
  app.set_version_flag("--version", LOCKSTEP_VERSION);
  app.require_subcommand(1);

  auto* devices = app.add_subcommand("devices", "how many replicas this machine would train with, and why");
  auto* inspect = app.add_subcommand("inspect", "the contents of a checkpoint, with its checksum verified");
  std::string path;
  inspect->add_option("checkpoint", path, "a .safetensors file, or a folder whose latest checkpoint is meant")
      ->required();
  CLI11_PARSE(app, argc, argv);

  try {
    if (*devices) lockstep::print_devices(std::cout);
    if (*inspect) lockstep::print_checkpoint(path, std::cout);
  } catch (const lockstep::Error& error) {
    std::cerr << "lockstep: " << error.what() << "\n";
    return 1;
  }
}
