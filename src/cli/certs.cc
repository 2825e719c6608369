#include "cli/commands.h"

#include <fcntl.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/rand.h>
#include <openssl/x509v3.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <vector>

#include "base/file.h"
#include "base/text.h"
#include "checkpoint/files.h"
#include "lockstep/base/error.h"

namespace lockstep::cli {
namespace {

constexpr const char* kName = "lockstep";  // as in parameter_server/grpc_service/credentials.h
constexpr int kMostDays = 3650;

template <auto free_it>
struct Freed {
  template <class T>
  void operator()(T* object) const {
    free_it(object);
  }
};
using Key = std::unique_ptr<EVP_PKEY, Freed<EVP_PKEY_free>>;
using Certificate = std::unique_ptr<X509, Freed<X509_free>>;
using Extension = std::unique_ptr<X509_EXTENSION, Freed<X509_EXTENSION_free>>;
using Memory = std::unique_ptr<BIO, Freed<BIO_free>>;

void require(bool done, const char* what) {
  if (done) return;
  char why[256] = "";
  ERR_error_string_n(ERR_get_error(), why, sizeof why);
  throw Error(text("cannot make ", what, ": ", why));
}

Key make_key() {
  Key key(EVP_EC_gen("P-256"));
  require(key != nullptr, "a key");
  return key;
}

void extend(X509& certificate, X509& issuer, int kind, const char* value) {
  X509V3_CTX context;
  X509V3_set_ctx_nodb(&context);
  X509V3_set_ctx(&context, &issuer, &certificate, nullptr, nullptr, 0);
  const Extension extension(X509V3_EXT_conf_nid(nullptr, &context, kind, value));
  require(extension != nullptr && X509_add_ext(&certificate, extension.get(), -1) == 1, "a certificate's extension");
}

// Signed by the issuer's key; `issuer` null: by its own.
Certificate certify(EVP_PKEY& key, const std::string& name, X509* issuer, EVP_PKEY& issuers_key, int days) {
  Certificate certificate(X509_new());
  require(certificate != nullptr, "a certificate");
  auto& made = *certificate;
  std::int64_t serial = 0;
  require(RAND_bytes(reinterpret_cast<unsigned char*>(&serial), sizeof serial) == 1, "a random number");
  auto* const subject = X509_get_subject_name(&made);
  const auto* const common_name = reinterpret_cast<const unsigned char*>(name.c_str());
  const bool filled = X509_set_version(&made, X509_VERSION_3) == 1 &&
                      ASN1_INTEGER_set_int64(X509_get_serialNumber(&made), serial & INT64_MAX) == 1 &&
                      X509_gmtime_adj(X509_getm_notBefore(&made), -3600) != nullptr &&  // clocks differ
                      X509_gmtime_adj(X509_getm_notAfter(&made), 86400L * days) != nullptr &&
                      X509_set_pubkey(&made, &key) == 1 &&
                      X509_NAME_add_entry_by_txt(subject, "CN", MBSTRING_ASC, common_name, -1, -1, 0) == 1 &&
                      X509_set_issuer_name(&made, issuer == nullptr ? subject : X509_get_subject_name(issuer)) == 1;
  require(filled, "a certificate");
  if (issuer == nullptr) {
    extend(made, made, NID_basic_constraints, "critical,CA:TRUE,pathlen:0");
    extend(made, made, NID_key_usage, "critical,keyCertSign");
  } else {
    extend(made, *issuer, NID_basic_constraints, "critical,CA:FALSE");
    extend(made, *issuer, NID_key_usage, "critical,digitalSignature");
    extend(made, *issuer, NID_ext_key_usage, "serverAuth,clientAuth");
    extend(made, *issuer, NID_subject_alt_name, text("DNS:", kName).c_str());
  }
  require(X509_sign(&made, &issuers_key, EVP_sha256()) > 0, "a signature");
  return certificate;
}

std::string random_digits() {
  unsigned char bytes[16];
  require(RAND_bytes(bytes, sizeof bytes) == 1, "random numbers");
  std::string digits;
  for (const auto byte : bytes) digits += text(std::hex, byte >> 4, byte & 15);
  return digits;
}

template <class Write>
std::string printed(const Write& write) {
  const Memory memory(BIO_new(BIO_s_mem()));
  require(memory != nullptr && write(memory.get()) == 1, "a file");
  char* data = nullptr;
  const auto size = BIO_get_mem_data(memory.get(), &data);
  return {data, static_cast<std::size_t>(size)};
}

// All files or none. Throws IoError where one is there already.
struct NewFile {
  std::filesystem::path path;
  std::string contents;
  mode_t mode = 0;
};
void write_new(const std::vector<NewFile>& files) {
  for (auto file = files.begin(); file != files.end(); ++file) {
    errno = 0;
    const FileDescriptor to(open(file->path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, file->mode));
    const auto size = static_cast<ssize_t>(file->contents.size());
    if (to.open() && write(to.get(), file->contents.data(), file->contents.size()) == size) continue;
    const int why = errno == 0 ? ENOSPC : errno;
    for (auto made = files.begin(); made != file; ++made) unlink(made->path.c_str());
    if (to.open()) unlink(file->path.c_str());
    throw IoError(
        text("cannot write ", file->path.string(), ": ", std::strerror(why),
             why == EEXIST ? "; name a new folder: those that use the old certificates could not call others" : ""));
  }
}

}  // namespace

void make_certificates(const std::filesystem::path& folder, int days) {
  if (days < 1 || days > kMostDays) {
    throw InvalidArgument(text("--days is ", days, "; it must be from 1 to ", kMostDays));
  }
  const auto authority_key = make_key(), key = make_key();
  // A name of its own, so that certificates of two jobs are told apart.
  const auto authority = certify(*authority_key, text("lockstep job ", random_digits()), nullptr, *authority_key, days);
  const auto certificate = certify(*key, kName, authority.get(), *authority_key, days);
  checkpoint::make_folders(checkpoint::absolute_path(folder));
  const auto printed_key =
      printed([&](BIO* to) { return PEM_write_bio_PrivateKey(to, key.get(), nullptr, nullptr, 0, nullptr, nullptr); });
  const auto print = [](const Certificate& of) {
    return printed([&](BIO* to) { return PEM_write_bio_X509(to, of.get()); });
  };
  write_new({{folder / "key.pem", printed_key, S_IRUSR | S_IWUSR},
             {folder / "cert.pem", print(certificate), 0644},
             {folder / "ca.pem", print(authority), 0644}});
}

}  // namespace lockstep::cli
