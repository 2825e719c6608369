#include "lockstep/access.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "base/file_descriptor.h"
#include "base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

constexpr std::size_t kTokenBytes = 32;
constexpr std::size_t kLongestFile = 256;

int digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

ClusterError bad_file(const std::string& path, const std::string& problem) {
  return ClusterError(text(kTokenFileVariable, ": ", path, " ", problem));
}

std::string read_token(const std::string& path) {
  const FileDescriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file.open()) throw bad_file(path, text("cannot be read: ", std::strerror(errno)));
  struct stat status {};
  if (fstat(file.get(), &status) != 0 || (status.st_mode & (S_IRWXG | S_IRWXO)) != 0) {
    throw bad_file(path, text("may be read by others than its owner; chmod 600 ", path));
  }
  std::string digits(kLongestFile, '\0');
  const auto count = pread(file.get(), digits.data(), digits.size(), 0);
  digits.resize(count > 0 ? static_cast<std::size_t>(count) : 0);
  while (!digits.empty() && std::isspace(static_cast<unsigned char>(digits.back()))) digits.pop_back();
  std::string token;
  for (std::size_t i = 0; i + 1 < digits.size() && digit(digits[i]) >= 0 && digit(digits[i + 1]) >= 0; i += 2) {
    token += static_cast<char>(digit(digits[i]) * 16 + digit(digits[i + 1]));
  }
  if (token.size() != kTokenBytes || digits.size() != 2 * kTokenBytes) {
    throw bad_file(path, text("has no token; it must hold ", 2 * kTokenBytes, " hexadecimal digits (openssl rand -hex ",
                              kTokenBytes, ")"));
  }
  return token;
}

bool read_trust(const Environment& environment) {
  const char* const value = environment(kTrustedNetworkVariable);
  if (value == nullptr || std::strcmp(value, "0") == 0) return false;
  if (std::strcmp(value, "1") == 0) return true;
  throw ClusterError(text(kTrustedNetworkVariable, " is \"", value, "\"; it must be 0 or 1"));
}

}  // namespace

Access access_of(const Environment& environment) {
  const char* const path = environment(kTokenFileVariable);
  return {path == nullptr ? "" : read_token(path), read_trust(environment)};
}

Access access_of_environment() {
  return access_of([](const char* name) { return std::getenv(name); });
}

}  // namespace lockstep
