// `lockstep certs`: certificates for the processes of one job.
#pragma once

#include <filesystem>

namespace lockstep::cli {

// Writes cert.pem and key.pem, which all processes of a job show, and ca.pem into `folder`, which must not have them.
// ca.pem is an authority that has certified this certificate and no other; its key is not kept. The certificates are
// valid for `days`. Throws InvalidArgument and IoError.
void make_certificates(const std::filesystem::path& folder, int days);

}  // namespace lockstep::cli
