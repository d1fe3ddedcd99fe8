// Streams as threads, events and clocks of the virtual device. Work queued on a stream runs on its thread, in order.
//
// Beside the machine's time, each stream has a clock of its own: work moves it on by the cost that was set for it, a
// wait to the time of the event, and the host's clock moves when the host waits. So times between events are those of
// the device that the costs describe, whatever else the machine does.
#pragma once

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <tuple>

namespace virtual_device {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 4;
constexpr int kStreams = 32;  // of a device, as in CUDA's pool: the next one asked for is the first again

struct Settings {
  std::atomic<double> op_seconds{0}, link_seconds{0};  // on the device's clocks
  std::atomic<double> host_seconds{0};                 // on the host's clock, to queue a work
  std::atomic<double> longest_delay{0};                // the machine's seconds, before work and collectives
  std::atomic<uint64_t> seed{0};
  std::atomic<bool> broken{false};  // what unpins memory fails, as all calls of CUDA do after a failed kernel
  std::atomic<bool> lazy{false};  // an operator's first launch waits for running work, as CUDA's lazy loading
};
inline Settings settings;

struct Counts {
  std::atomic<int64_t> events{0}, blocks{0}, bytes{0}, host_waits{0};
};
inline Counts counts;

inline void raise_to(std::atomic<double>& clock, double time) {
  for (double now = clock; now < time && !clock.compare_exchange_weak(now, time);) {
  }
}
inline std::atomic<double> host_clock{0};

class Stream {
 public:
  // What runs gets the stream's clock, to read and to move on.
  using Task = std::function<void(double&)>;

  Stream() : random_(std::random_device{}()) {
    std::thread([this] { serve(); }).detach();
  }

  // works: whether it occupies the device while it runs; a wait for an event does not.
  void put(Task task, bool works = true) {
    if (const double taken = settings.host_seconds; taken > 0) host_clock += taken;
    {
      const std::lock_guard lock(mutex_);
      tasks_.push_back({std::move(task), host_clock, works});
      ++put_;
    }
    changed_.notify_all();
  }
  bool idle() {
    const std::lock_guard lock(mutex_);
    return done_ == put_;
  }
  // Waits for what has been put so far, and throws what it threw.
  void synchronize() {
    std::unique_lock lock(mutex_);
    const uint64_t until = put_;
    changed_.wait(lock, [&] { return done_ >= until; });
    raise_to(host_clock, clock_);
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }
  // Waits for the work that runs now.
  void finish_running() {
    std::unique_lock lock(mutex_);
    const uint64_t until = done_ + 1;
    if (working_) changed_.wait(lock, [&] { return done_ >= until; });
  }
  // For the stream's own thread: a random time, up to the longest delay.
  void delay() {
    if (const double longest = settings.longest_delay; longest > 0) {
      if (const uint64_t seed = settings.seed; seed != seed_) random_.seed(seed_ = seed);
      std::this_thread::sleep_for(
          std::chrono::duration<double>(std::uniform_real_distribution<double>(0, longest)(random_)));
    }
  }

 private:
  void serve() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return !tasks_.empty(); });
      auto [task, put_at, works] = std::move(tasks_.front());
      tasks_.pop_front();
      working_ = works;
      double clock = std::max(clock_, put_at);
      std::exception_ptr error;
      lock.unlock();
      try {
        task(clock);
      } catch (...) {
        error = std::current_exception();
      }
      task = nullptr;
      lock.lock();
      clock_ = clock;
      if (error) error_ = error;
      working_ = false;
      ++done_;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::tuple<Task, double, bool>> tasks_;  // with the host's clock, and whether it works
  bool working_ = false;
  uint64_t put_ = 0, done_ = 0;
  double clock_ = 0;
  std::exception_ptr error_;
  std::mt19937_64 random_;
  uint64_t seed_ = 0;
};

// Never destroyed, as their threads never end.
inline Stream& stream_of(c10::DeviceIndex device, int64_t id) {
  static std::mutex mutex;
  static auto* const all = new std::array<Stream*, kDevices * kStreams>{};
  const std::lock_guard lock(mutex);
  Stream*& found = all->at(device * kStreams + id);
  if (!found) found = new Stream();
  return *found;
}
inline Stream& stream_of(const c10::Stream& stream) { return stream_of(stream.device_index(), stream.id()); }

inline thread_local c10::DeviceIndex current_device = 0;
inline thread_local std::array<int64_t, kDevices> current_streams{};
inline Stream& current_stream(c10::DeviceIndex device) {
  return stream_of(device, current_streams.at(device));
}
inline std::atomic<int64_t> last_stream{0};
inline int64_t next_stream() { return 1 + last_stream++ % (kStreams - 1); }

// A version per recording: a wait is for the one before it.
class Event {
 public:
  Event() { ++counts.events; }
  ~Event() { --counts.events; }
  uint64_t ask() {
    const std::lock_guard lock(mutex_);
    return ++asked_;
  }
  uint64_t asked() {
    const std::lock_guard lock(mutex_);
    return asked_;
  }
  void reach(uint64_t version, double time) {
    {
      const std::lock_guard lock(mutex_);
      done_ = std::max(done_, version);
      time_ = time;
    }
    changed_.notify_all();
  }
  double wait(uint64_t version) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_ >= version; });
    return time_;
  }
  bool passed() {
    const std::lock_guard lock(mutex_);
    return done_ >= asked_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t asked_ = 0, done_ = 0;
  double time_ = 0;
};
using SharedEvent = std::shared_ptr<Event>;  // tasks may outlive the event's owner

inline void record(const SharedEvent& event, Stream& stream) {
  stream.put([event, version = event->ask()](double& clock) { event->reach(version, clock); }, false);
}
inline void block(const SharedEvent& event, Stream& stream) {
  stream.put(
      [event, version = event->asked()](double& clock) { clock = std::max(clock, event->wait(version)); },
      false);
}
// The host waits.
inline void synchronize(const SharedEvent& event) {
  ++counts.host_waits;
  raise_to(host_clock, event->wait(event->asked()));
}
inline void synchronize(Stream& stream) {
  ++counts.host_waits;
  stream.synchronize();
}
inline void synchronize(c10::DeviceIndex device) {
  ++counts.host_waits;
  for (int64_t id = 0; id < kStreams; ++id) stream_of(device, id).synchronize();
}

// Loads what is launched for the first time, which waits for the work that runs on the device.
inline void load(c10::DeviceIndex device, const std::string& name) {
  static std::mutex mutex;
  static auto* const loaded = new std::set<std::string>{};
  if (!settings.lazy) return;
  {
    const std::lock_guard lock(mutex);
    if (!loaded->insert(name).second) return;
  }
  for (int64_t id = 0; id < kStreams; ++id) stream_of(device, id).finish_running();
}

void record_use(const c10::DataPtr& memory, const c10::Stream& stream);  // memory.h

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kType, std::exchange(current_device, device.index())};
  }
  c10::Device getDevice() const override { return {kType, current_device}; }
  void setDevice(c10::Device device) const override { current_device = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  static c10::Stream made(c10::Device device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, device.has_index() ? device : c10::Device(kType, current_device),
                       id);
  }
  c10::Stream getStream(c10::Device device) const override {
    return made(device, current_streams.at(device.has_index() ? device.index() : current_device));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return made(device, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return made(device, next_stream());
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return made(device, next_stream()); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return made(stream.device(), std::exchange(current_streams.at(stream.device_index()), stream.id()));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return &stream_of(stream); }
  bool queryStream(const c10::Stream& stream) const override { return stream_of(stream).idle(); }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(stream_of(stream)); }
  void synchronizeDevice(const c10::DeviceIndex device) const override { synchronize(device); }

  static SharedEvent& shared(void* event) { return *static_cast<SharedEvent*>(event); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (!*event) *event = new SharedEvent(std::make_shared<Event>());
    virtual_device::record(shared(*event), stream_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) virtual_device::block(shared(event), stream_of(stream));
  }
  bool queryEvent(void* event) const override { return !event || shared(event)->passed(); }
  void synchronizeEvent(void* event) const override {
    if (event) synchronize(shared(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<SharedEvent*>(event);
  }
  double elapsedTime(void* first, void* last, const c10::DeviceIndex) const override {
    const SharedEvent &from = shared(first), &to = shared(last);
    return static_cast<float>(
        1e3 * (to->wait(to->asked()) - from->wait(from->asked())));  // as CUDA's: ms in a float
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    record_use(memory, stream);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace virtual_device
