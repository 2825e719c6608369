#include "collective/work.h"

namespace lockstep {

void Work::State::finish(std::exception_ptr why) {
  MutexLock lock(mutex);
  error = std::move(why);
  done = true;
  finished.notify_all();
}

void Work::wait() const {
  if (state_->enqueued.join) return state_->enqueued.join();
  MutexLock lock(state_->mutex);
  while (!state_->done) state_->finished.wait(state_->mutex);
  if (state_->error) std::rethrow_exception(state_->error);
}

bool Work::done() const {
  if (state_->enqueued.done) return state_->enqueued.done();
  MutexLock lock(state_->mutex);
  return state_->done;
}

bool Work::succeeded() const {
  if (state_->enqueued.ended) return state_->enqueued.ended->told().value_or(false);
  MutexLock lock(state_->mutex);
  return state_->done && !state_->error;
}

void EndOfCalls::then(Listener listener) {
  std::optional<bool> told;
  {
    MutexLock lock(mutex_);
    told = told_;
    if (!told) listeners_.push_back(std::move(listener));
  }
  if (told) listener(*told);
}

std::optional<bool> EndOfCalls::told() {
  MutexLock lock(mutex_);
  return told_;
}

void EndOfCalls::tell(bool have_succeeded) {
  std::vector<Listener> listeners;
  {
    MutexLock lock(mutex_);
    if (told_) return;
    told_ = have_succeeded;
    listeners.swap(listeners_);
  }
  for (const auto& listener : listeners) listener(have_succeeded);
}

collective::ProgressThread::~ProgressThread() {
  std::deque<Task> left;
  {
    MutexLock lock(mutex_);
    ends_ = true;
    left.swap(tasks_);
    changed_.notify_all();
  }
  for (auto& task : left) {
    task.work->finish(std::make_exception_ptr(Aborted("the group was destroyed before this operation began")));
  }
}

Work collective::ProgressThread::add(const std::function<std::function<void()>()>& prepare) {
  auto state = std::make_shared<Work::State>();
  MutexLock lock(mutex_);
  tasks_.push_back({prepare(), state});
  if (!thread_.joinable()) thread_ = std::jthread([this] { loop(); });
  changed_.notify_all();
  return Work(std::move(state));
}

bool collective::ProgressThread::busy() {
  MutexLock lock(mutex_);
  return running_ || !tasks_.empty();
}

void collective::ProgressThread::loop() {
  while (true) {
    Task task;
    {
      MutexLock lock(mutex_);
      while (tasks_.empty() && !ends_) changed_.wait(mutex_);
      if (ends_) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
      running_ = true;
    }
    std::exception_ptr error;
    try {
      task.run();
    } catch (...) {
      error = std::current_exception();
    }
    task.run = nullptr;  // what it holds may end with it
    {
      MutexLock lock(mutex_);
      running_ = false;  // before anybody hears that it is done
    }
    task.work->finish(std::move(error));
  }
}

}  // namespace lockstep

namespace lockstep::collective {

bool TicketLock::wait(std::uint64_t number, Deadline deadline) {
  if (serving_.load(std::memory_order_acquire) == number) return true;
  MutexLock lock(mutex_);
  sleepers_.fetch_add(1);
  bool in_time = true;
  while (in_time && serving_.load() != number) {
    in_time = passed_.wait_until(mutex_, deadline.time()) != std::cv_status::timeout || serving_.load() == number;
  }
  sleepers_.fetch_sub(1);
  return in_time;
}

void TicketLock::pass(std::uint64_t number) {
  serving_.store(number + 1);
  if (sleepers_.load() == 0) return;
  MutexLock lock(mutex_);
  passed_.notify_all();
}

}  // namespace lockstep::collective
