#include "host_passage.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

#include "descriptions.h"
#include "device_work.h"

namespace oases {
namespace {

using Tensors = HostPassage::Tensors;

constexpr int64_t kPinnedBytes = 4096;  // what drivers pin
constexpr std::chrono::microseconds kLookAgain{50};

// Pinned memory for each tensor; that of `known` for tensors that are among `of`.
Tensors on_host(const Tensors& tensors, const Tensors& of, const Tensors& known) {
  Tensors found;
  for (const auto& tensor : tensors) {
    const auto same =
        std::find_if(of.begin(), of.end(), [&](const auto& other) { return other.is_same(tensor); });
    found.push_back(same != of.end()
                        ? known[same - of.begin()]
                        : at::empty(tensor.sizes(), tensor.options().device(at::kCPU).pinned_memory(true)));
  }
  return found;
}

}  // namespace

HostPassage::HostPassage(c10::Device device)
    : device_(device),
      words_(stream_words_of(device.type())),
      out_(new_stream(device)),
      in_(new_stream(device)),
      returned_(static_cast<uint32_t*>(std::aligned_alloc(kPinnedBytes, kPinnedBytes))) {
  std::memset(returned_, 0, kPinnedBytes);
  const c10::StreamGuard on(in_);
  words_.add_memory(reinterpret_cast<std::byte*>(returned_), kPinnedBytes);
}

HostPassage::~HostPassage() {
  try {
    const c10::StreamGuard on(in_);
    in_.synchronize();
    words_.remove_memory(reinterpret_cast<std::byte*>(returned_));
  } catch (const std::exception& error) {
    // After a failed kernel every call fails so, and a destructor must not.
    TORCH_WARN("staged keeps a page of its memory pinned: ", reason_of(error));
    return;
  }
  std::free(returned_);
}

HostPassage::Work HostPassage::queue(Worker& worker, int rank, c10d::OpType type, Tensors results,
                                     const Tensors& outputs, const Tensors& inputs, Call call,
                                     std::vector<Work> steps) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const at::AutoDispatchBelowADInplaceOrView below;  // as the worker
  const c10::impl::VirtualGuardImpl guard(device_.type());
  c10::Event ready(device_.type());
  ready.record(guard.getStream(device_));
  for (const auto& stream : {out_, in_}) ready.block(stream);
  Tensors used = outputs;
  used.insert(used.end(), inputs.begin(), inputs.end());
  under_way_.wait_for(used, {out_, in_});
  const auto here = std::make_shared<c10::Event>(device_.type()),
             done = std::make_shared<c10::Event>(device_.type());
  Tensors from, to;
  {
    const c10::StreamGuard on(out_);
    from = on_host(inputs, {}, {}), to = on_host(outputs, inputs, from);
    for (size_t i = 0; i < inputs.size(); ++i) from[i].copy_(inputs[i], /*non_blocking=*/true);
    here->record(out_);
    for (const auto& input : inputs) input.record_stream(out_);
  }
  const uint32_t ticket = ++tickets_;
  const auto run = [=, this, call = std::move(call)](LocalWork&) {
    const auto give_back = [&] {
      std::atomic_ref<uint32_t>(*returned_).store(ticket, std::memory_order_release);
    };
    try {
      c10::impl::VirtualGuardImpl(device_.type()).setDevice(device_);  // a new thread is on device 0
      while (!here->query()) std::this_thread::sleep_for(kLookAgain);  // raises an error of the device
      call(to, from);
    } catch (...) {
      for (const auto& output : to)
        if (output.nbytes() > 0) std::memset(output.data_ptr(), 0xff, output.nbytes());
      give_back();
      throw;
    }
    give_back();
  };
  auto work = worker.enqueue(rank, type, {}, run);
  {
    const c10::StreamGuard on(in_);
    words_.wait(in_, returned_, ticket);
    for (size_t i = 0; i < outputs.size(); ++i) at::Tensor(outputs[i]).copy_(to[i], /*non_blocking=*/true);
    done->record(in_);
  }
  for (const auto& tensor : used) tensor.record_stream(in_);  // which goes on once the host has read them
  while (!ends_.empty() && ends_.front()->query()) ends_.pop_front();
  ends_.push_back(done);
  under_way_.add(used, done);
  steps.push_back(std::move(work));
  return c10::make_intrusive<StepsWork>(rank, type, std::move(results), in_, done, std::move(steps));
}

}  // namespace oases
