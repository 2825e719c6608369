#include "tpu/program_cache.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "base/hash.h"
#include "base/log.h"
#include "base/text.h"
#include "lockstep/checkpoint/checkpoint.h"

namespace lockstep::tpu {
namespace {

constexpr const char* kProgram = "program";

std::string folder_of_environment() {
  const char* const folder = std::getenv("LOCKSTEP_CACHE");
  return folder == nullptr ? "" : folder;
}

// Programs for a CPU use the instructions that it has.
std::string instructions_of_cpu() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("flags")) return line;
  return "";
}

}  // namespace

std::string compiler_flags() {
  std::string all;
  for (const char* const name : {"XLA_FLAGS", "LIBTPU_INIT_ARGS"}) {
    const char* const flags = std::getenv(name);
    all += text(name, "=", flags == nullptr ? "" : flags, "\n");
  }
  return all;
}

ProgramCache::ProgramCache(std::shared_ptr<const pjrt::Client> client)
    : client_(std::move(client)), folder_(folder_of_environment()) {}

std::string ProgramCache::name_of(const ProgramKey& key) const {
  std::string all = text(client_->platform(), "\n", client_->version(), "\n", client_->devices()[0].kind, "\n",
                         key.options.replicas, "\n", join(key.options.devices), "\n", client_->process(), "\n");
  if (client_->platform() == "cpu") all += instructions_of_cpu() + "\n";
  all += compiler_flags();
  for (const auto& [name, on] : key.options.switches) all += text(name, "=", on, "\n");
  all += key.text;
  return (std::filesystem::path(folder_) /
          text("program-", std::hex, hash_of(all), "-", std::hash<std::string>()(all), ".safetensors"))
      .string();
}

std::optional<pjrt::Executable> ProgramCache::find(const ProgramKey& key) const {
  if (folder_.empty()) return std::nullopt;
  const auto path = name_of(key);
  if (!std::filesystem::exists(path)) return std::nullopt;
  try {
    const auto archive = read_archive(path);
    const auto& bytes = archive.tensor(kProgram).bytes;
    return pjrt::Executable::load(client_, {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  } catch (const Error& error) {
    log_warning(text("the compiled program in the cache is not used, and compiled again: ", error.what()));
    return std::nullopt;
  }
}

void ProgramCache::store(const ProgramKey& key, const pjrt::Executable& executable) const {
  if (folder_.empty()) return;
  try {
    const auto serialized = executable.program().serialize();
    Archive archive;
    auto& stored = archive.tensors[kProgram];
    stored.dtype = DType::uint8;
    stored.shape = {static_cast<std::int64_t>(serialized.size())};
    const auto* const begin = reinterpret_cast<const std::byte*>(serialized.data());
    stored.bytes.assign(begin, begin + serialized.size());
    write_archive(name_of(key), archive);
  } catch (const Error& error) {
    log_warning(text("LOCKSTEP_CACHE: the compiled program is not kept: ", error.what()));
  }
}

}  // namespace lockstep::tpu
