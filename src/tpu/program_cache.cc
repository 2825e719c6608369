#include "tpu/devices.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <span>

#include "base/hash.h"
#include "base/log.h"
#include "base/text.h"
#include "checkpoint/files.h"
#include "checkpoint/own_files.h"
#include "lockstep/base/error.h"
#include "lockstep/checkpoint/checkpoint.h"

namespace lockstep::tpu {
namespace {

constexpr const char* kProgram = "program";
constexpr const char* kKey = "key";
constexpr const char* kVariable = "LOCKSTEP_CACHE";

std::string folder_of_environment() {
  const char* const folder = std::getenv(kVariable);
  if (folder == nullptr || *folder == '\0') return "";
  try {
    checkpoint::make_folders(checkpoint::absolute_path(folder).parent_path());
  } catch (const IoError& error) {
    throw InvalidArgument(text(kVariable, ": ", error.what()));
  }
  ::mkdir(folder, S_IRWXU);  // whatever the umask; where that fails, the next line says why
  checkpoint::require_private_folder(kVariable, folder);
  return folder;
}

StoredTensor stored(const std::string& text_of_it) {
  const auto bytes = std::as_bytes(std::span(text_of_it));
  return {DType::uint8, {static_cast<std::int64_t>(bytes.size())}, {bytes.begin(), bytes.end()}};
}

std::string text_in(const StoredTensor& tensor) {
  return {reinterpret_cast<const char*>(tensor.bytes.data()), tensor.bytes.size()};
}

// A file that only this user, or root, can have written, and that has a checksum.
void require_own(const std::string& path) {
  struct stat info {};
  const bool is_own = ::lstat(path.c_str(), &info) == 0 && (info.st_uid == ::geteuid() || info.st_uid == 0) &&
                      (info.st_mode & (S_IWGRP | S_IWOTH)) == 0 &&
                      checkpoint::is_own_archive(std::filesystem::path(path));
  if (!is_own) throw DataError(text(path, " is no file that Lockstep wrote for this user"));
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

// The text of all that decides which program a compiler makes.
std::string ProgramCache::key_of(const std::string& program, const pjrt::CompileOptions& options) const {
  std::string all = text(client_->platform(), "\n", client_->version(), "\n", client_->devices()[0].kind, "\n",
                         options.replicas, "\n", join(options.devices), "\n", client_->process(), "\n");
  if (client_->platform() == "cpu") all += instructions_of_cpu() + "\n";
  all += compiler_flags();
  for (const auto& [name, on] : options.switches) all += text(name, "=", on, "\n");
  return all + program;
}

std::string ProgramCache::name_of(const std::string& key) const {
  return (std::filesystem::path(folder_) /
          text("program-", std::hex, hash_of(key), "-", std::hash<std::string>()(key), ".safetensors"))
      .string();
}

std::optional<pjrt::Executable> ProgramCache::find(const std::string& program,
                                                   const pjrt::CompileOptions& options) const {
  if (folder_.empty()) return std::nullopt;
  const auto key = key_of(program, options);
  const auto path = name_of(key);
  try {
    if (!checkpoint::is_taken(path)) return std::nullopt;
    require_own(path);
    const auto archive = read_archive(path);
    if (text_in(archive.tensor(kKey)) != key) throw DataError(text(path, " is of another program"));
    return pjrt::Executable::load(client_, text_in(archive.tensor(kProgram)));
  } catch (const Error& error) {
    log_warning(text("the compiled program in the cache is not used, and compiled again: ", error.what()));
    return std::nullopt;
  }
}

void ProgramCache::store(const std::string& program, const pjrt::CompileOptions& options,
                         const pjrt::Executable& executable) const {
  if (folder_.empty()) return;
  try {
    const auto key = key_of(program, options);
    Archive archive;
    archive.tensors[kKey] = stored(key);
    archive.tensors[kProgram] = stored(executable.program().serialize());
    write_archive(name_of(key), archive);
  } catch (const Error& error) {
    log_warning(text(kVariable, ": the compiled program is not kept: ", error.what()));
  }
}

}  // namespace lockstep::tpu
