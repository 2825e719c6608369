#include "transport/seal.h"

#include <sodium.h>

#include <array>
#include <cstring>

#include "lockstep/base/error.h"

namespace lockstep::transport {
namespace {

static_assert(sizeof(Proof) == crypto_aead_chacha20poly1305_IETF_KEYBYTES);
static_assert(Seal::kTag == crypto_aead_chacha20poly1305_IETF_ABYTES);

using Nonce = std::array<unsigned char, crypto_aead_chacha20poly1305_IETF_NPUBBYTES>;

Nonce nonce_of(std::uint64_t number) {
  Nonce nonce{};
  std::memcpy(nonce.data(), &number, sizeof number);
  return nonce;
}

const unsigned char* bytes_of(std::string_view text) { return reinterpret_cast<const unsigned char*>(text.data()); }
unsigned char* bytes_of(std::string& text) { return reinterpret_cast<unsigned char*>(text.data()); }

}  // namespace

Seal::Seal(const SessionKeys& keys, End end)
    : to_send_(end == End::connects ? keys.connects : keys.accepts),
      to_receive_(end == End::connects ? keys.accepts : keys.connects) {}

std::string Seal::close(std::string_view message) {
  const auto length = static_cast<std::uint32_t>(message.size() + kTag);
  std::string sealed(sizeof length + length, '\0');
  std::memcpy(sealed.data(), &length, sizeof length);
  crypto_aead_chacha20poly1305_ietf_encrypt(bytes_of(sealed) + sizeof length, nullptr, bytes_of(message),
                                            message.size(), nullptr, 0, nullptr, nonce_of(sent_++).data(),
                                            to_send_.data());
  return sealed;
}

std::string Seal::open(std::string_view sealed) {
  std::string message(sealed.size() < kTag ? 0 : sealed.size() - kTag, '\0');
  if (sealed.size() < kTag ||
      crypto_aead_chacha20poly1305_ietf_decrypt(bytes_of(message), nullptr, nullptr, bytes_of(sealed), sealed.size(),
                                                nullptr, 0, nonce_of(received_++).data(), to_receive_.data()) != 0) {
    throw ClusterError("what came over a connection is not what the other side has sent");
  }
  return message;
}

}  // namespace lockstep::transport
