#include "parameter_server/grpc_service/credentials.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/create_channel_posix.h>
#include <grpcpp/support/channel_arguments.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <sodium.h>
#include <sys/stat.h>

#include <cstring>
#include <filesystem>
#include <memory>

#include "base/file.h"
#include "base/text.h"
#include "lockstep/base/error.h"
#include "parameter_server/grpc_service/frames.h"

namespace lockstep::grpc_service {

namespace {

constexpr const char* kScheme = "tls://";

std::string read(const std::filesystem::path& file) {
  const auto unreadable = [&](const std::string& why) {
    return ClusterError(text(kCertificatesVariable, ": ", why, "; `lockstep certs` makes the folder"));
  };
  std::string contents;
  try {
    contents = read_small_file(file.string());
  } catch (const IoError& error) {
    throw unreadable(error.what());
  }
  if (contents.empty()) throw unreadable(text(file.string(), " is empty"));
  return contents;
}

// gRPC does not say what is wrong with them.
void check_key(const std::filesystem::path& folder, const grpc::SslCredentialsOptions& certificates) {
  const auto open = [](const std::string& pem) {
    return std::unique_ptr<BIO, decltype(&BIO_free)>(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())),
                                                     BIO_free);
  };
  const auto unreadable = [&](const char* file) {
    return ClusterError(text(kCertificatesVariable, ": ", (folder / file).string(), " is not a PEM file of that kind; ",
                             "`lockstep certs` makes the folder"));
  };
  const std::unique_ptr<X509, decltype(&X509_free)> certificate(
      PEM_read_bio_X509(open(certificates.pem_cert_chain).get(), nullptr, nullptr, nullptr), X509_free);
  if (!certificate) throw unreadable("cert.pem");
  const std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)> key(
      PEM_read_bio_PrivateKey(open(certificates.pem_private_key).get(), nullptr, nullptr, nullptr), EVP_PKEY_free);
  if (!key) throw unreadable("key.pem");
  if (X509_check_private_key(certificate.get(), key.get()) == 1) return;
  throw ClusterError(text(kCertificatesVariable, ": key.pem in ", folder.string(),
                          " does not belong to cert.pem beside ",
                          "it; all three files must come from one `lockstep certs`"));
}

grpc::SslCredentialsOptions read_certificates(const std::filesystem::path& folder) {
  const auto key = folder / "key.pem";
  struct stat about = {};
  if (stat(key.c_str(), &about) == 0 && (about.st_mode & (S_IRWXG | S_IRWXO)) != 0) {
    throw ClusterError(text(kCertificatesVariable, ": others may read ", key.string(), "; chmod 600 it"));
  }
  const grpc::SslCredentialsOptions certificates{.pem_root_certs = read(folder / "ca.pem"),
                                                 .pem_private_key = read(key),
                                                 .pem_cert_chain = read(folder / "cert.pem")};
  check_key(folder, certificates);
  return certificates;
}

}  // namespace

std::shared_ptr<grpc::ServerCredentials> server_credentials(const Access& access) {
  if (access.certificates.empty()) return grpc::InsecureServerCredentials();
  const auto certificates = read_certificates(access.certificates);
  grpc::SslServerCredentialsOptions options(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  options.pem_root_certs = certificates.pem_root_certs;
  options.pem_key_cert_pairs.push_back({certificates.pem_private_key, certificates.pem_cert_chain});
  return grpc::SslServerCredentials(options);
}

std::shared_ptr<grpc::ChannelCredentials> channel_credentials(const Access& access) {
  if (access.certificates.empty()) return grpc::InsecureChannelCredentials();
  return grpc::SslCredentials(read_certificates(access.certificates));
}

std::string told_address(const std::string& address, const Access& access) {
  return access.certificates.empty() ? address : kScheme + address;
}

std::string called_address(const std::string& told, const Access& access, const std::string& server) {
  const bool uses_tls = told.starts_with(kScheme);
  if (uses_tls == access.certificates.empty()) {
    throw ClusterError(
        text(server, uses_tls ? " uses TLS and this process does not" : " does not use TLS, and this process does",
             ": ", kCertificatesVariable, " must name the job's certificates in all processes or in none"));
  }
  return uses_tls ? told.substr(std::strlen(kScheme)) : told;
}

bool is_refused_certificate(const std::string& message) {
  return message.find("CERTIFICATE_VERIFY_FAILED") != std::string::npos ||
         message.find("certificate verify failed") != std::string::npos;
}

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

namespace {

// A process of the job needs milliseconds. Who does not prove is not waited for: its place may be a stranger's now.
constexpr std::chrono::seconds kToConnectItself(5);

grpc::ChannelArguments channel_arguments() {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(static_cast<int>(kLongestMessage));
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 10'000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  return arguments;
}

std::shared_ptr<grpc::Channel> tls_channel(const std::string& address, const Access& access) {
  auto arguments = channel_arguments();
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 50);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1'000);
  arguments.SetSslTargetNameOverride(kTlsName);
  return grpc::CreateCustomChannel(address, channel_credentials(access), arguments);
}

}  // namespace

transport::Greeting calls_greeting() { return {.protocol = {'c', 'a', 'l', 'l', 's'}}; }

std::shared_ptr<grpc::Channel> open_channel(const std::string& address, const Access& access, Deadline deadline,
                                            std::string& problem) {
  if (!access.certificates.empty()) return tls_channel(address, access);
  const auto to_prove = Deadline::after(kToConnectItself);
  const auto soonest = to_prove.time() < deadline.time() ? to_prove : deadline;
  auto socket = transport::connect_once(address, soonest, problem);
  if (!socket.open()) return nullptr;
  try {
    transport::introduce(socket, access, calls_greeting(), soonest);
  } catch (const DeadlineExceeded&) {
    problem = "who answers there is silent";
    return nullptr;
  } catch (const ClusterError& error) {
    problem = error.what();
    return nullptr;
  }
  return grpc::CreateCustomInsecureChannelFromFd(address, socket.release(), channel_arguments());
}

}  // namespace lockstep::grpc_service
