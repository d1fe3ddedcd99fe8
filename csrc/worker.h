// Thread that runs functions one after another, for backends whose collectives take several steps.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "join_thread.h"
#include "local_work.h"

namespace oases {

class Worker {
 public:
  Worker() : thread_([this] { serve(); }) {}
  // Runs what is queued, then ends.
  ~Worker() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      closing_ = true;
    }
    arrived_.notify_all();
    join_thread(thread_);
  }

  // Queues `run`; an exception of it ends the work.
  c10::intrusive_ptr<c10d::Work> enqueue(int rank, c10d::OpType type, std::vector<at::Tensor> outputs,
                                         std::function<void(LocalWork&)> run) {
    auto work = c10::make_intrusive<LocalWork>(rank, type, std::move(outputs));
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      queue_.push_back({work, std::move(run)});
    }
    arrived_.notify_one();
    return work;
  }

 private:
  struct Job {
    c10::intrusive_ptr<LocalWork> work;
    std::function<void(LocalWork&)> run;
  };

  void serve() {
    while (true) {
      std::unique_lock<std::mutex> lock(mutex_);
      arrived_.wait(lock, [this] { return closing_ || !queue_.empty(); });
      if (queue_.empty()) return;
      Job job = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      std::exception_ptr error;
      try {
        job.run(*job.work);
      } catch (...) {
        error = std::current_exception();  // rethrown to callers that wait
      }
      job.run = nullptr;
      job.work->end(error);
    }
  }

  std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<Job> queue_;
  bool closing_ = false;
  std::thread thread_;  // last member: the thread reads the others
};

}  // namespace oases
