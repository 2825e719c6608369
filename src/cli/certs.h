// `lockstep certs`: certificates for the processes of one job.
#pragma once

#include <filesystem>

namespace lockstep::cli {

// Writes into `folder`, which must not have them already: cert.pem and key.pem, which all processes of a job show, and
// ca.pem, an authority that has certified this one and no other, and whose key is not kept. They are valid for `days`.
// Throws InvalidArgument and IoError.
void make_certificates(const std::filesystem::path& folder, int days);

}  // namespace lockstep::cli
