// Rows of tables in checkpoints: a file a server, beside that of its shards, which is written and read a piece at a
// time. Of a table of n rows it has the tensors NAME/ids and NAME/last_update [n], NAME and optimizer/STATE/NAME
// [n, width].
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/sharded_archive.h"
#include "parameter_server/table_shard.h"

namespace lockstep::parameter_server {

// One of several servers.
struct ServerNumber {
  int index = 0, count = 1;
};

using TableShards = std::span<const std::unique_ptr<TableShard>>;

// Writes what the cuts of the tables have, and ends them. `states`: the names of the optimizer's. Returns how many
// steps were applied; nothing where there was no cut. Throws IoError.
std::optional<std::int64_t> save_tables(TableShards tables, const std::vector<std::string>& states, std::int64_t end,
                                        const std::filesystem::path& file);

// Says in a checkpoint's main file where `servers` servers have written theirs: in a folder of rows_folder.
void list_tables(Archive& main, const std::string& folder, int servers);

// Replaces the rows by those of the checkpoint that are this server's, whatever the number of servers that wrote it.
// Without `change` it only checks. Throws as ArchiveReader, and InvalidArgument where a table is missing or another
// one.
void restore_tables(TableShards tables, const std::vector<std::string>& states, ServerNumber server,
                    const checkpoint::ShardedArchive& archive, const SavedSteps& steps, bool change);

}  // namespace lockstep::parameter_server
