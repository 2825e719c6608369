#include "lockstep/transport/access.h"

#include <cstdlib>
#include <cstring>

#include "base/text.h"
#include "lockstep/base/error.h"
#include "transport/user_token.h"

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
