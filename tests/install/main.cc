#include <cstdio>
#include <cstring>

#include "minference/version.h"

int main() {
  std::puts(minference::version());
  return std::strcmp(minference::version(), MINFERENCE_VERSION);
}
