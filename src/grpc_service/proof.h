// How a caller shows that it has the job's token without sending it.
#pragma once

#include <string>

#include "lockstep/transport/access.h"

namespace lockstep::grpc_service {

// Random bytes of a connection.
std::string fresh_nonce();

// HMAC-SHA-256 of them under the job's token.
std::string proof_of(const Access& access, const std::string& nonce);

// In constant time.
bool is_proof(const Access& access, const std::string& nonce, const std::string& proof);

}  // namespace lockstep::grpc_service
