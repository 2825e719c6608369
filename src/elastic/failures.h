// Exceptions of the program by which members end.
#pragma once

#include <cstdint>
#include <exception>
#include <string>

#include "elastic/members.h"
#include "elastic/registry.h"
#include "elastic/stores.h"

namespace lockstep::elastic {

// One member that fails may be on a machine that does not work: the others go on without it, as if it were lost. Where
// two fail in one section, the program would fail on all of them, one after the other, so that all end.

// Whether the exception is the program's, and not of the job's members or their connections.
bool is_of_program(const std::exception& error);

// The exception's text. Where the text names members by other numbers than the launcher does, the launcher's numbers
// follow.
std::string describe(const std::exception& error, const Members& members);

// To be called before other members can notice that this one has failed in the section. Does not throw.
void tell_failure(Stores& stores, const Members& members, std::int64_t section, const std::exception& error);

// Throws Error with their reasons where two members, as this one's host knows, have failed in the section.
void require_fewer_than_two_failures(Registry& registry, std::int64_t section);

}  // namespace lockstep::elastic
