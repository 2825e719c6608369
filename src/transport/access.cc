#include "lockstep/transport/access.h"

#include <fcntl.h>
#include <pwd.h>
#include <sodium.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "base/file.h"
#include "base/text.h"
#include "lockstep/base/error.h"
#include "transport/connections.h"
#include "transport/handshake.h"

namespace lockstep {

namespace {

bool read_trust(const Environment& environment) {
  const char* const value = environment(kTrustedNetworkVariable);
  if (value == nullptr || std::strcmp(value, "0") == 0) return false;
  if (std::strcmp(value, "1") == 0) return true;
  throw ClusterError(text(kTrustedNetworkVariable, " is \"", value, "\"; it must be 0 or 1"));
}

}  // namespace

Access access_of(const Environment& environment) {
  const char* const path = environment(kTokenFileVariable);
  const char* const certificates = environment(kCertificatesVariable);
  return {.token = path == nullptr ? "" : transport::read_token(kTokenFileVariable, path),
          .trusted_network = read_trust(environment),
          .certificates = certificates == nullptr ? "" : certificates};
}

Access access_of_environment() {
  auto access = access_of([](const char* name) { return std::getenv(name); });
  if (!access.token.empty() || access.trusted_network) return access;
  access.token = transport::user_token(transport::home_of_user());
  access.of_this_user = !access.token.empty();
  return access;
}

}  // namespace lockstep

namespace lockstep::transport {

namespace {

constexpr std::size_t kTokenBytes = 32;
constexpr std::size_t kLongestFile = 256;

// Makes the file whole or not at all: another process may be making the file. False where it cannot be made.
bool make_token_file(const std::string& path) {
  const auto beside = text(path, ".", random_name());
  const FileDescriptor file(open(beside.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!file.open()) return false;
  const auto digits = random_name() + random_name() + "\n";
  const bool made = write(file.get(), digits.data(), digits.size()) == static_cast<ssize_t>(digits.size()) &&
                    (link(beside.c_str(), path.c_str()) == 0 || errno == EEXIST);
  unlink(beside.c_str());
  return made;
}

// True where a file that is made in the folder is its maker's alone. False where a file system has fixed modes, or
// gives all files to one owner.
bool keeps_modes(const std::string& folder) {
  const auto path = text(folder, "/.lockstep-probe.", random_name());
  const FileDescriptor file(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  struct stat status {};
  const bool kept = file.open() && fstat(file.get(), &status) == 0 && status.st_uid == geteuid() &&
                    (status.st_mode & (S_IRWXG | S_IRWXO)) == 0;
  if (file.open()) unlink(path.c_str());
  return kept;
}

}  // namespace

std::string read_token(const std::string& name, const std::string& path) {
  const auto bad_file = [&](const std::string& problem) { return ClusterError(text(name, ": ", path, " ", problem)); };
  const FileDescriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));  // a FIFO would wait
  if (!file.open()) throw bad_file(text("cannot be read: ", std::strerror(errno)));
  struct stat status {};
  if (fstat(file.get(), &status) != 0 || (status.st_mode & (S_IRWXG | S_IRWXO)) != 0) {
    throw bad_file(text("may be read by others than its owner; chmod 600 ", path));
  }
  std::string digits(kLongestFile, '\0');
  const auto count = pread(file.get(), digits.data(), digits.size(), 0);
  digits.resize(count > 0 ? static_cast<std::size_t>(count) : 0);
  while (!digits.empty() && std::isspace(static_cast<unsigned char>(digits.back()))) digits.pop_back();
  std::string token(kTokenBytes, '\0');
  auto* const bytes = reinterpret_cast<unsigned char*>(token.data());
  if (digits.size() != 2 * kTokenBytes ||
      sodium_hex2bin(bytes, token.size(), digits.data(), digits.size(), nullptr, nullptr, nullptr) != 0) {
    throw bad_file(text("has no token; it must hold ", 2 * kTokenBytes, " hexadecimal digits (openssl rand -hex ",
                        kTokenBytes, ")"));
  }
  return token;
}

std::string user_token(const std::string& home) {
  if (home.empty()) return {};
  const auto folder = home + "/.lockstep", path = folder + "/token";
  const bool made = mkdir(folder.c_str(), 0700) == 0;
  if (!made && errno != EEXIST) return {};
  struct stat status {};
  if (stat(folder.c_str(), &status) != 0) return {};
  const bool safe =
      S_ISDIR(status.st_mode) && status.st_uid == geteuid() && (status.st_mode & (S_IWGRP | S_IWOTH)) == 0;
  if (!safe && (made || !keeps_modes(home))) return {};  // the file system has owners or modes of its own
  if (!safe) {
    throw ClusterError(text("the token of this user: ", folder, " must be a folder of its own that nobody else may ",
                            "write to; chmod 700 ", folder, ", or name a token in LOCKSTEP_TOKEN_FILE"));
  }
  const bool there = access(path.c_str(), F_OK) == 0 || make_token_file(path);
  return there && keeps_modes(folder) ? read_token("the token of this user", path) : "";
}

std::string home_of_user() {
  std::vector<char> words(16384);
  passwd entry{};
  passwd* found = nullptr;
  if (getpwuid_r(geteuid(), &entry, words.data(), words.size(), &found) == 0 && found != nullptr) {
    return found->pw_dir;
  }
  const char* const home = std::getenv("HOME");
  return home == nullptr ? "" : home;
}

}  // namespace lockstep::transport
