#include "grpc_service/credentials.h"

#include <openssl/pem.h>
#include <openssl/x509.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <memory>

#include "base/regular_file.h"
#include "base/text.h"
#include "lockstep/base/error.h"

namespace lockstep::grpc_service {
namespace {

constexpr const char* kScheme = "tls://";

struct Certificates {
  std::string authority, certificate, key;  // PEM
};

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
void check_key(const std::filesystem::path& folder, const Certificates& certificates) {
  const auto open = [](const std::string& pem) {
    return std::unique_ptr<BIO, decltype(&BIO_free)>(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())),
                                                     BIO_free);
  };
  const auto unreadable = [&](const char* file) {
    return ClusterError(text(kCertificatesVariable, ": ", (folder / file).string(), " is not a PEM file of that kind; ",
                             "`lockstep certs` makes the folder"));
  };
  const std::unique_ptr<X509, decltype(&X509_free)> certificate(
      PEM_read_bio_X509(open(certificates.certificate).get(), nullptr, nullptr, nullptr), X509_free);
  if (!certificate) throw unreadable("cert.pem");
  const std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)> key(
      PEM_read_bio_PrivateKey(open(certificates.key).get(), nullptr, nullptr, nullptr), EVP_PKEY_free);
  if (!key) throw unreadable("key.pem");
  if (X509_check_private_key(certificate.get(), key.get()) == 1) return;
  throw ClusterError(text(kCertificatesVariable, ": key.pem in ", folder.string(),
                          " does not belong to cert.pem beside ",
                          "it; all three files must come from one `lockstep certs`"));
}

Certificates read_certificates(const std::filesystem::path& folder) {
  const auto key = folder / "key.pem";
  struct stat about = {};
  if (stat(key.c_str(), &about) == 0 && (about.st_mode & (S_IRWXG | S_IRWXO)) != 0) {
    throw ClusterError(text(kCertificatesVariable, ": others may read ", key.string(), "; chmod 600 it"));
  }
  Certificates certificates{read(folder / "ca.pem"), read(folder / "cert.pem"), read(key)};
  check_key(folder, certificates);
  return certificates;
}

}  // namespace

std::shared_ptr<grpc::ServerCredentials> server_credentials(const Access& access) {
  if (access.certificates.empty()) return grpc::InsecureServerCredentials();
  const auto [authority, certificate, key] = read_certificates(access.certificates);
  grpc::SslServerCredentialsOptions options(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  options.pem_root_certs = authority;
  options.pem_key_cert_pairs.push_back({key, certificate});
  return grpc::SslServerCredentials(options);
}

std::shared_ptr<grpc::ChannelCredentials> channel_credentials(const Access& access) {
  if (access.certificates.empty()) return grpc::InsecureChannelCredentials();
  const auto [authority, certificate, key] = read_certificates(access.certificates);
  return grpc::SslCredentials({.pem_root_certs = authority, .pem_private_key = key, .pem_cert_chain = certificate});
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

}  // namespace lockstep::grpc_service
