// When members end: by which exceptions of the program, and how the others hear of them.
#pragma once

#include <cstdint>
#include <exception>
#include <string>

#include "cluster/stores.h"
#include "elastic/members.h"
#include "elastic/registry.h"

namespace lockstep::elastic {

// A member that fails alone may be on a machine that does not work: the others go on without it, as if it were lost.
// Where two fail in one section, the program would fail on all members, one after the other; so all end.

// Returns true where the exception is the program's, and not one of the job's members or their connections.
bool is_of_program(const std::exception& error);

// Returns the exception's text. Where the text names members by other numbers than the launcher does, the launcher's
// numbers follow.
std::string describe(const std::exception& error, const Members& members);

// Tells the others why this member failed. Call it before they can notice the failure in the section. Does not throw.
void tell_failure(cluster::Stores& stores, const Members& members, std::int64_t section, const std::exception& error);

// Throws Error with the reasons of both where two members, as this one's host knows, have failed in the section.
void require_fewer_than_two_failures(Registry& registry, std::int64_t section);

}  // namespace lockstep::elastic
