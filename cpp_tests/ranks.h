// Ranks as threads of one process.
#pragma once

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <atomic>
#include <exception>
#include <functional>
#include <thread>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <vector>

namespace oases_tests {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Wrap = std::function<c10::intrusive_ptr<c10d::Backend>(c10::intrusive_ptr<c10d::Backend>)>;

inline c10::intrusive_ptr<c10d::Backend> gloo(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                              int size) {
  auto options = c10d::ProcessGroupGloo::Options::create();
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
  options->timeout = std::chrono::seconds(30);
  return c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, options);
}

// Calls body(rank) on `size` threads; raises what a rank raised once all have ended.
inline void on_threads(int size, const std::function<void(int)>& body) {
  at::set_num_threads(1);
  std::vector<std::exception_ptr> errors(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (...) {
        errors[rank] = std::current_exception();
      }
    });
  for (auto& thread : threads) thread.join();
  for (const auto& error : errors)
    if (error) std::rethrow_exception(error);
}

// What a call raises; "" if it does not.
inline std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

// Numbers whose sums are exact, other ones on each rank.
inline at::Tensor numbers(int rank, int64_t count) {
  return at::arange(count, at::kFloat).remainder(13) + rank;
}

// Calls body(rank, group, name) on `size` threads, joined by gloo over a HashStore. The name is registered for
// ops; every rank has its own, because the registry belongs to the process. wrap: wraps each rank's gloo backend.
inline void run_ranks(int size, const std::function<void(int, const Group&, const std::string&)>& body,
                      const Wrap& wrap = nullptr) {
  static std::atomic<int> runs{0};
  const int run = runs++;
  const auto store = c10::make_intrusive<c10d::HashStore>();
  // Until all are done: one that went early would cut off those that still connect.
  std::vector<c10::intrusive_ptr<c10d::Backend>> connected(size);
  on_threads(size, [&](int rank) {
    const std::string name = c10::str("run", run, "/rank", rank);
    auto backend = connected[rank] = gloo(store, rank, size);
    if (wrap) backend = wrap(backend);
    const auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, size);
    const auto type = wrap ? c10d::ProcessGroup::BackendType::CUSTOM : c10d::ProcessGroup::BackendType::GLOO;
    group->setBackend(c10::DeviceType::CPU, type, backend);
    group->setDefaultBackend(type);
    group->setGroupName(name);
    c10d::register_process_group(name, group);
    body(rank, group, name);
    c10d::unregister_process_group(name);
  });
}

}  // namespace oases_tests
