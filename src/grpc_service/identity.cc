#include "grpc_service/identity.h"

#include <sodium.h>

#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::grpc_service {
namespace {

// Values of keys that end with "-bin" may be any bytes.
constexpr const char* kNonceKey = "lockstep-nonce-bin";
constexpr const char* kProofKey = "lockstep-proof-bin";
constexpr const char* kVersionKey = "lockstep-version";
constexpr std::size_t kNonce = 32;
constexpr const char kFor[] = "lockstep parameter servers";  // so that it is no proof of anything else

// HMAC-SHA-256 of the nonce under the job's token.
std::string proof_of(const Access& access, const std::string& nonce) {
  const auto bytes = [](const std::string& text) { return reinterpret_cast<const unsigned char*>(text.data()); };
  std::string proof(crypto_auth_hmacsha256_BYTES, '\0');
  crypto_auth_hmacsha256_state state;
  crypto_auth_hmacsha256_init(&state, bytes(access.token), access.token.size());
  crypto_auth_hmacsha256_update(&state, reinterpret_cast<const unsigned char*>(kFor), sizeof(kFor));
  crypto_auth_hmacsha256_update(&state, bytes(nonce), nonce.size());
  crypto_auth_hmacsha256_final(&state, reinterpret_cast<unsigned char*>(proof.data()));
  return proof;
}

std::string fresh_nonce() {
  std::string nonce(kNonce, '\0');
  randombytes_buf(nonce.data(), nonce.size());
  return nonce;
}

// Empty where the call does not have it.
std::string value_of(const grpc::ServerContext& context, const char* key) {
  const auto& values = context.client_metadata();
  const auto found = values.find(key);
  return found == values.end() ? "" : std::string(found->second.data(), found->second.size());
}

}  // namespace

Identity::Identity(const Access& access, std::string version) : version_(std::move(version)) {
  if (access.certificates.empty()) return;
  nonce_ = fresh_nonce();
  proof_ = proof_of(access, nonce_);
}

void Identity::add_to(grpc::ClientContext& context) const {
  context.AddMetadata(kVersionKey, version_);
  if (nonce_.empty()) return;
  context.AddMetadata(kNonceKey, nonce_);
  context.AddMetadata(kProofKey, proof_);
}

namespace {

void check_token(const grpc::ServerContext& context, const Access& access) {
  const auto nonce = value_of(context, kNonceKey), proof = value_of(context, kProofKey);
  const auto expected = proof_of(access, nonce);
  const bool proved = nonce.size() == kNonce && proof.size() == expected.size() &&
                      sodium_memcmp(proof.data(), expected.data(), expected.size()) == 0;
  if (!proved) throw ClusterError("the caller does not have the token of this job");
}

}  // namespace

void check_identity(const grpc::ServerContext& context, const Access& access) {
  if (!access.certificates.empty()) check_token(context, access);
  const auto theirs = value_of(context, kVersionKey);
  if (theirs == version()) return;
  throw ClusterError(text("the caller is of Lockstep \"", theirs, "\" and this process of ", version(),
                          ": all processes of a job need the same version"));
}

}  // namespace lockstep::grpc_service
