// Checkpoints on disk, and how a custom loop saves and restores its objects. Torch-free.
//
// A checkpoint is one safetensors file: tensors under their names, and text entries in its metadata, with a checksum
// over the whole file. The file is written beside its place, flushed, and renamed, so that a kill at any moment leaves
// the previous one whole. The next writer removes the half-written file of a killed one. TensorFlow's text file
// `checkpoint` in the folder names the latest checkpoint and those that are kept. Lockstep removes only files that it
// wrote, and follows no symbolic link to remove one. Any thread may call the functions; other processes may write and
// read the same folder.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/collective/communicator.h"

namespace lockstep {

// A tensor's bytes, in row-major order.
struct StoredTensor {
  DType dtype = DType::float32;
  std::vector<std::int64_t> shape;
  std::vector<std::byte> bytes;
};

// The contents of one checkpoint. A plain value.
struct Archive {
  std::map<std::string, StoredTensor> tensors;
  std::map<std::string, std::string> entries;

  // Throw InvalidArgument naming what is missing.
  const StoredTensor& tensor(const std::string& name) const;
  const std::string& entry(const std::string& name) const;

  // Entries that are a whole number, one number, or several with spaces between them. Throw InvalidArgument where the
  // entry is missing and DataError, naming it, where it is something else.
  std::int64_t integer(const std::string& name) const;
  double number(const std::string& name) const;
  std::vector<double> numbers(const std::string& name) const;

  // Writes `values` so that they are read back to equal bits.
  void set_numbers(const std::string& name, const std::vector<double>& values);
};

// The file of a checkpoint: `path` itself if it ends in ".safetensors", else `path` with that ending.
std::string checkpoint_file(const std::string& path);

// Writes `archive` whole or not at all, making the folder if need be; several writers of one path do not disturb each
// other. Replaces the file, or the link to a file, that is there. Throws IoError naming the file and the reason, and
// InvalidArgument where a name or a text is no UTF-8.
void write_archive(const std::string& path, const Archive& archive);

// Reads the file at checkpoint_file(path). Throws IoError where the file cannot be read or is no regular file. Throws
// DataError, with the offset, where it is cut short, altered or no safetensors file. Files of other programs, which
// have no checksum of Lockstep's, are accepted.
Archive read_archive(const std::string& path);

// The path of the last checkpoint that was saved in `directory`, as load_weights and Checkpoint::restore take it. Where
// one of its files is missing, cut short or altered: the last checkpoint that is whole, with a warning that says why.
// Empty where there is none. Reads all files of the checkpoint. Throws IoError where one cannot be read. Follows
// tf.train.latest_checkpoint.
std::string latest_checkpoint(const std::string& directory);

// Appends `path` to the index of its folder as the latest, and to `kept`. Where `kept` then has more than `max_to_keep`
// (0: no bound), drops the first ones from both and deletes their files. Other checkpoints stay; other processes may
// record theirs meanwhile. Throws IoError where the folder's file `checkpoint` is no index or cannot be written, and
// where another process holds its lock for 30 s.
void record_checkpoint(const std::string& path, std::vector<std::string>& kept, int max_to_keep = 0);

// Changes `kept` as record_checkpoint does, and nothing on disk; returns the paths that are dropped.
std::vector<std::string> keep_checkpoint(const std::string& path, std::vector<std::string>& kept, int max_to_keep);

// Stores `kept` in a checkpoint under `prefix`, as paths relative to `folder`; load_kept reads it back. So a copied
// folder does not refer to the original's files, and an altered checkpoint cannot name a file outside of the folder.
void save_kept(const std::vector<std::string>& kept, const std::string& folder, Archive& archive,
               const std::string& prefix);
std::vector<std::string> load_kept(const Archive& archive, const std::string& prefix, const std::string& folder);

// Something that a Checkpoint saves and restores. `load` checks everything, changes nothing, and returns what makes the
// change and cannot fail; so a restore happens whole or not at all.
struct Trackable {
  std::function<void(Archive& archive, const std::string& prefix)> save;
  std::function<std::function<void()>(const Archive& archive, const std::string& prefix)> load;
  Communicator ranks = {};  // the processes that have it together

  // The part of the object that other processes have (parameter servers), in files of their own; null where they have
  // nothing. These files are written before `save` is called, and read after `load`.
  struct Files {
    std::function<void(const std::string& path)> save;
    std::function<void(const std::string& path, bool change)> load;  // without `change` it only checks
  };
  Files files = {};
};

// A number of the loop's own, which must outlive the Checkpoint.
Trackable track(std::int64_t& counter);
Trackable track(double& value);

// Follows tf.train.Checkpoint: objects under names. Not thread safe. Where several processes have an object together,
// all make the same calls; rank 0's disk is written and read.
class Checkpoint {
 public:
  explicit Checkpoint(std::map<std::string, Trackable> objects);

  // Saves to `prefix`-1, then -2 and so on; returns the path and records it in the folder's index.
  std::string save(const std::string& prefix);

  // Saves to exactly `path`. Throws IoError.
  void write(const std::string& path) const;

  // Throws as read_archive, and InvalidArgument naming what the file lacks or holds in another shape; then nothing
  // changed. A checkpoint of a loop with parameter servers can be restored without any, but for rows of tables.
  void restore(const std::string& path);

 private:
  friend class CheckpointManager;
  std::string write_next(const std::string& prefix);
  Archive read(const std::string& path) const;

  std::map<std::string, Trackable> objects_;
  Communicator ranks_;
  std::int64_t save_counter_ = 0;
};

struct CheckpointManagerOptions {
  int max_to_keep = 5;  // 0: all
  std::string checkpoint_name = "ckpt";
};

// Follows tf.train.CheckpointManager: numbered checkpoints in one folder, of which the last ones are kept.
class CheckpointManager {
 public:
  CheckpointManager(Checkpoint& checkpoint, std::string directory, CheckpointManagerOptions options = {});

  std::string save();
  std::string latest() const;

  // Restores the latest one; false when there is none.
  bool restore_or_initialize();

 private:
  Checkpoint& checkpoint_;
  std::string directory_;
  CheckpointManagerOptions options_;
  std::vector<std::string> kept_;  // those that are in the folder's index at the beginning count too
};

}  // namespace lockstep
