#include "grpc_service/proof.h"

#include <sodium.h>

namespace lockstep::grpc_service {
namespace {

constexpr std::size_t kNonce = 32;
constexpr const char kFor[] = "lockstep parameter servers";  // so that it is no proof of anything else

}  // namespace

std::string fresh_nonce() {
  std::string nonce(kNonce, '\0');
  randombytes_buf(nonce.data(), nonce.size());
  return nonce;
}

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

bool is_proof(const Access& access, const std::string& nonce, const std::string& proof) {
  const auto expected = proof_of(access, nonce);
  return nonce.size() == kNonce && proof.size() == expected.size() &&
         sodium_memcmp(proof.data(), expected.data(), expected.size()) == 0;
}

}  // namespace lockstep::grpc_service
