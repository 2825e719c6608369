// Lists of hosts and hostfiles, good and broken.
#include "cluster/launch/hosts.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include "base/expect_says_testing.h"
#include "base/fresh_folder_testing.h"
#include "cluster/launch/host_part.h"
#include "lockstep/base/error.h"

namespace lockstep::launch {
namespace {

using Slots = std::vector<HostSlots>;

TEST(Hosts, ListsNameHostsAndSlots) {
  EXPECT_EQ(parse_hosts("a"), (Slots{{"a", 1}}));
  EXPECT_EQ(parse_hosts("a:4,user@b.example.org:2,10.0.0.7"),
            (Slots{{"a", 4}, {"user@b.example.org", 2}, {"10.0.0.7", 1}}));
  EXPECT_EQ(parse_hosts("[fe80::1%eth0]:3,[::1]"), (Slots{{"fe80::1%eth0", 3}, {"::1", 1}}));
}

TEST(Hosts, BrokenListsAreNamed) {
  EXPECT_EQ(message_of<InvalidArgument>([] { parse_hosts(""); }), "-H: \"\" ends without a host");
  EXPECT_EQ(message_of<InvalidArgument>([] { parse_hosts("a,"); }), "-H: \"a,\" ends without a host");
  EXPECT_EQ(message_of<InvalidArgument>([] { parse_hosts("a,,b"); }), "-H: \"\" has no host's name or address");
  EXPECT_EQ(message_of<InvalidArgument>([] { parse_hosts("a:0"); }),
            "-H: \"a:0\" has \"0\" slots; it must be a number from 1 to 4096");
  EXPECT_EQ(message_of<InvalidArgument>([] { parse_hosts("a:4x"); }),
            "-H: \"a:4x\" has \"4x\" slots; it must be a number from 1 to 4096");
  EXPECT_EQ(message_of<InvalidArgument>([] { parse_hosts("a:"); }), "-H: \"a:\" has no number after its colon");
  EXPECT_EQ(message_of<InvalidArgument>([] { parse_hosts("fe80::1"); }),
            "-H: \"fe80::1\" has two colons; put an address of IPv6 in brackets");
  EXPECT_EQ(message_of<InvalidArgument>([] { parse_hosts("[::1]4"); }), "-H: \"[::1]4\" goes on after its address");
  EXPECT_EQ(message_of<InvalidArgument>([] { parse_hosts("a:1,a:2"); }), "-H: a is named twice");
  // Names that ssh would take for an option, or a shell for more than a word.
  for (const auto* name : {"-oProxyCommand=x", "a;reboot", "a b", "$(x)", "a'"}) {
    EXPECT_EQ(message_of<InvalidArgument>([&] { parse_hosts(name); }),
              std::string("-H: \"") + name + "\" has no host's name or address");
  }
}

TEST(Hosts, FilesHaveAHostALine) {
  EXPECT_EQ(parse_hostfile("# all\n\na slots=4\nb:2 # the small one\n  c\t\nd   slots=1", "hosts"),
            (Slots{{"a", 4}, {"b", 2}, {"c", 1}, {"d", 1}}));
  EXPECT_EQ(message_of<InvalidArgument>([] { parse_hostfile("# none\n", "hosts"); }), "hosts names no host");
  EXPECT_EQ(message_of<InvalidArgument>([] { parse_hostfile("a\nb slots=many", "hosts"); }),
            "hosts, line 2: \"b slots=many\" has \"many\" slots; it must be a number from 1 to 4096");
  EXPECT_EQ(message_of<InvalidArgument>([] { parse_hostfile("a max=4", "hosts"); }),
            "hosts, line 1: \"a max=4\" is not: host slots=4");
  EXPECT_EQ(message_of<InvalidArgument>([] { parse_hostfile("a slots=4 b", "hosts"); }),
            "hosts, line 1: \"a slots=4 b\" is not: host slots=4");
  EXPECT_THROW(read_hostfile("/nowhere/hosts"), IoError);
}

TEST(Hosts, RanksFillThemInOrder) {
  const Slots hosts{{"a", 2}, {"b", 3}};
  EXPECT_EQ(fill(hosts, std::nullopt), hosts);
  EXPECT_EQ(fill(hosts, 3), (Slots{{"a", 2}, {"b", 1}}));
  EXPECT_EQ(fill(hosts, 2), (Slots{{"a", 2}}));
  EXPECT_EQ(fill({}, 7), Slots());
  EXPECT_EQ(message_of<InvalidArgument>([&] { fill(hosts, 6); }), "-n is 6; the hosts have 5 slots");
}

TEST(Parts, AreOneLineOfText) {
  const HostPart part{.size = 4,
                      .first = 2,
                      .count = 2,
                      .host = "b",
                      .store = "10.0.0.1:5",
                      .command = {"./train", "a b\n'\""},
                      .environment = {{"X", "1"}},
                      .folder = "/tmp",
                      .token = "ff"};
  const auto line = line_of(part);
  EXPECT_EQ(line.find('\n'), line.size() - 1);
  const auto read = part_in(line);
  EXPECT_EQ(line_of(read), line);
  const auto ranks = ranks_of(read, "/token");
  ASSERT_EQ(ranks.size(), 2u);
  EXPECT_EQ(ranks[1].name, "rank 3 on b");
  EXPECT_EQ(ranks[1].command, part.command);
  EXPECT_EQ(ranks[1].environment.at("LOCKSTEP_RANK"), "3");
  EXPECT_EQ(ranks[1].environment.at("LOCKSTEP_LOCAL_RANK"), "1");
  EXPECT_EQ(ranks[1].environment.at("X"), "1");
  for (const auto* bad : {"", "{", "[]", "{\"size\": \"many\"}", "nonsense"}) {
    EXPECT_NE(message_of<InvalidArgument>([&] { part_in(bad); }).find("what to run here cannot be read"),
              std::string::npos)
        << bad;
  }
  EXPECT_NE(message_of<InvalidArgument>([] { line_of({.command = {"\xff"}}); }).find("must be UTF-8"),
            std::string::npos);
}

TEST(Hosts, AHostfileThatMayNeverEndIsRefused) {
  const auto folder = fresh_folder("hosts", "special");
  ASSERT_EQ(mkfifo((folder / "fifo").c_str(), 0600), 0);
  std::ofstream(folder / "holes") << "a";
  std::filesystem::resize_file(folder / "holes", std::uintmax_t{1} << 40);
  EXPECT_NE(message_of<IoError>([&] { read_hostfile((folder / "fifo").string()); }).find("it is a FIFO"),
            std::string::npos);
  EXPECT_NE(message_of<IoError>([] { read_hostfile("/dev/zero"); }).find("it is a device"), std::string::npos);
  EXPECT_NE(message_of<IoError>([&] { read_hostfile((folder / "holes").string()); }).find("more than"),
            std::string::npos);
  std::ofstream(folder / "hosts") << "a slots=2\n";
  std::filesystem::create_symlink("hosts", folder / "link");
  EXPECT_EQ(read_hostfile((folder / "link").string())[0].slots, 2);
}

}  // namespace
}  // namespace lockstep::launch
