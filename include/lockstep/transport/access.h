// Access: which processes belong to a job. Torch-free.
#pragma once

#include <functional>
#include <string>

namespace lockstep {

// The value of a variable, or nullptr.
using Environment = std::function<const char*(const char* name)>;

// A process listens at loopback addresses; at others only with a job's token, or where the network is trusted. A value.
//
// The two ends of each connection first prove to each other that they have the token. The proof is the HMAC-SHA-256 of
// both ends' random numbers, ranks, group and generation, and of the address that was dialled. Messages between a
// process and the job's store are sealed. Other messages are neither encrypted nor signed, except between the processes
// of ParameterServerStrategy with `certificates`.
struct Access {
  // 32 random bytes that all processes of a job have and nobody else. Empty: none.
  std::string token;

  // Trusts everybody who reaches this machine to read and change what is trained: allows listening without a token, and
  // connections that are not authenticated (UCX).
  bool trusted_network = false;

  // All processes of this user have the token: it keeps other users out on loopback, and does not allow listening at
  // other addresses.
  bool of_this_user = false;

  // A folder that `lockstep certs` has made, and the calls between the processes of ParameterServerStrategy then use
  // mutual TLS. Empty: none.
  std::string certificates = {};
};

inline constexpr const char* kTokenFileVariable = "LOCKSTEP_TOKEN_FILE";
inline constexpr const char* kTrustedNetworkVariable = "LOCKSTEP_TRUSTED_NETWORK";
inline constexpr const char* kCertificatesVariable = "LOCKSTEP_CERTS";

// Reads the variables: LOCKSTEP_TOKEN_FILE is a file with 64 hexadecimal digits that its owner alone may read (openssl
// rand -hex 32). LOCKSTEP_TRUSTED_NETWORK is 0 or 1, LOCKSTEP_CERTS is a folder. `lockstep run` sets them. Throws
// ClusterError naming the variable and the file.
Access access_of(const Environment& environment);

// Reads this process's variables. Where both are unset, the token is in ~/.lockstep/token, which only this user may
// read and which the first use makes. There is no token where the home folder cannot be written.
Access access_of_environment();

}  // namespace lockstep
