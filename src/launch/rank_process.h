// One process of a job, and what it prints.
#pragma once

#include <sys/types.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "transport/file_descriptor.h"

namespace lockstep {

// Output by lines; the last one may lack its end. What is longer than a line may be comes in pieces.
class Lines {
 public:
  using Take = std::function<void(const std::string& line)>;
  void add(const char* bytes, std::size_t count, const Take& take);
  void finish(const Take& take);

 private:
  std::string begun_;
};

struct RankCommand {
  int rank = 0;
  std::vector<std::string> command;
  std::map<std::string, std::string> environment;  // added to this process's
  std::string log_file;                            // empty: none
};

class RankProcess {
 public:
  enum class Stream { out, error };

  // Starts it in a group of processes of its own, with nothing to read, that is killed when the calling thread ends.
  // Throws ClusterError where the program cannot be started.
  explicit RankProcess(const RankCommand& command);

  int rank() const { return rank_; }
  pid_t pid() const { return pid_; }

  // What to poll for reading; -1 once the stream has ended.
  int descriptor(Stream stream) const { return streams_[static_cast<int>(stream)].socket.get(); }

  // Reads some of what is there: into the log file, and whole lines to `print`. False where there was nothing.
  bool read(Stream stream, const Lines::Take& print);

  // At its end: the last line of what it wrote to its error stream, or to the other; empty where it wrote nothing.
  const std::string& last_words() const { return last_error_.empty() ? last_line_ : last_error_; }

  bool ended() const { return ended_; }
  int status() const { return status_; }  // the exit status, or 128 and the signal's number
  int signal() const { return signal_; }  // that ended it, or 0

  // Whether it has just ended; then nothing of its group is left.
  bool reap();
  void send(int signal) const;

 private:
  struct Channel {
    FileDescriptor socket;
    Lines lines;
  };

  int rank_ = 0;
  pid_t pid_ = 0;
  Channel streams_[2];
  FileDescriptor log_;
  std::string last_line_, last_error_;
  bool ended_ = false;
  int status_ = 0, signal_ = 0;
};

}  // namespace lockstep
