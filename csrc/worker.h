// Thread that runs functions one after another, for backends whose collectives take several steps.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "join_thread.h"
#include "local_work.h"

namespace oases {

class Worker {
 public:
  // Runs what is queued, then ends.
  ~Worker() {
    // A fork has no such thread, and the end of a condition variable waits for all that wait on it.
    if (getpid() != process_) static_cast<void>(queue_.release());
  }

  // Queues `run`; an exception of it ends the work. What it calls of torch goes below autograd and inference mode: the
  // thread knows of neither, and data are all that collectives change.
  c10::intrusive_ptr<c10d::Work> enqueue(int rank, c10d::OpType type, std::vector<at::Tensor> outputs,
                                         std::function<void(LocalWork&)> run) {
    TORCH_CHECK(
        getpid() == process_, c10d::opTypeToString(type),
        " was called in a fork of the process that created its process group, whose threads a fork does "
        "not have; start processes by spawn, or create the group after the fork");
    auto work = c10::make_intrusive<LocalWork>(rank, type, std::move(outputs));
    queue_->put({work, std::move(run)});
    return work;
  }

 private:
  struct Job {
    c10::intrusive_ptr<LocalWork> work;
    std::function<void(LocalWork&)> run;
  };

  class Queue {
   public:
    Queue() : thread_([this] { serve(); }) {}
    ~Queue() {
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        closing_ = true;
      }
      arrived_.notify_all();
      join_thread(thread_);
    }

    void put(Job job) {
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        jobs_.push_back(std::move(job));
      }
      arrived_.notify_one();
    }

   private:
    void serve() {
      while (true) {
        std::unique_lock<std::mutex> lock(mutex_);
        arrived_.wait(lock, [this] { return closing_ || !jobs_.empty(); });
        if (jobs_.empty()) return;
        Job job = std::move(jobs_.front());
        jobs_.pop_front();
        lock.unlock();
        std::exception_ptr error;
        try {
          const at::AutoDispatchBelowADInplaceOrView below;
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
    std::deque<Job> jobs_;
    bool closing_ = false;
    std::thread thread_;  // last member: the thread reads the others
  };

  const pid_t process_ = getpid();
  std::unique_ptr<Queue> queue_ = std::make_unique<Queue>();
};

}  // namespace oases
