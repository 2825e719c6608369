// TF_CONFIG from anywhere.
#include "cluster/resolvers.h"
#include "tests/fuzz/fuzz.h"

void lockstep::fuzz(const std::string& bytes) { cluster::parse_tf_config(bytes); }
