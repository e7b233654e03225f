// host_main.cpp -- makes a program of a kernel file, for sanitizers: reads a job file, executes the kernel that it names, writes the
// arrays back in place.
// host.py describes the file. Every array lives in an allocation of exactly its size, so that a step outside is seen.
#include "host_run.cpp"
#include <cstdio>
#include <dlfcn.h>
#include <memory>

static FILE* job;

static i64 number() {
  i64 value;
  if (std::fread(&value, sizeof value, 1, job) != 1) std::abort();
  return value;
}
static void bytes(void* to, i64 size) {
  if (size && std::fread(to, size, 1, job) != 1) std::abort();
}

int main(int, char** arguments) {
  job = std::fopen(arguments[1], "r+b");
  if (!job) return 2;
  std::string name(number(), ' ');
  bytes(name.data(), name.size());
  Kernel* kernel = reinterpret_cast<Kernel*>(dlsym(RTLD_DEFAULT, name.c_str()));
  if (!kernel) return 2;
  const i64 blocks = number(), cluster = number(), shared_bytes = number(), deferred = number();
  std::vector<char> params(number());
  bytes(params.data(), params.size());

  struct Array { std::unique_ptr<char[]> memory; i64 size; long place; };
  std::vector<Array> arrays(number());
  for (Array& array : arrays) {
    std::vector<i64> fields(number());
    for (i64& field : fields) field = number();
    const i64 first = number();
    array.size = number();
    array.memory.reset(new char[array.size]);
    array.place = std::ftell(job);
    bytes(array.memory.get(), array.size);
    char* data = array.memory.get() + first;
    for (const i64 field : fields) std::memcpy(params.data() + field, &data, sizeof data);
  }

  char message[4096] = "";
  u64 counts[3] = {};
  Run* run;
  launch(&run, kernel, params.data(), blocks, int(cluster), int(shared_bytes), int(deferred), 1);
  run->thread.join();
  const int fault = finish(run, counts, message, sizeof message);
  std::puts(message);
  for (const Array& array : arrays) {
    std::fseek(job, array.place, SEEK_SET);
    std::fwrite(array.memory.get(), 1, array.size, job);
  }
  std::fclose(job);
  return fault ? 3 : 0;                                       // sanitizers end with 1 or 66
}
