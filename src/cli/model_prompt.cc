#include "cli/model_prompt.h"

#include <algorithm>

#include "cli/model_run.h"
#include "cli/prompt_file.h"
#include "minference/error.h"

namespace minference::cli {

void add_prompt_options(CLI::App& command, PromptOptions& options) {
  CLI::Option* file =
      command.add_option("-f,--file", options.file, "Prompt file; - is standard input");
  command.add_option("-p,--prompt", options.text, "Prompt text")->excludes(file);
  command.add_flag("--no-chat", options.no_chat, "Use the prompt without the chat template");
  command.add_option("--system", options.system, "System message of the chat template");
}

std::string read_prompt(const CLI::App& command, const PromptOptions& options) {
  if (command.count("-f") == 0 && command.count("-p") == 0) {
    throw InvalidArgument(command.get_name() + " needs a prompt: -p text, -f file or -f -");
  }
  if (command.count("-f") > 0) return read_prompt_file(options.file);
  check_prompt(options.text, "the prompt");
  return options.text;
}

std::string render_prompt(const llama_host::Engine& engine, const PromptOptions& options,
                          const std::string& prompt) {
  if (options.no_chat) return prompt;
  if (!engine.model().has_chat_template) {
    warn(engine.model().name + " has no chat template; the prompt is used as it is");
    return prompt;
  }
  return engine.apply_chat_template(options.system, prompt);
}

std::int64_t context_for(const llama_host::Engine& engine, std::int64_t prompt_tokens,
                         std::int64_t answer_tokens) {
  const std::int64_t trained = engine.model().trained_context;
  if (prompt_tokens > trained) {
    throw InvalidArgument("the prompt has " + std::to_string(prompt_tokens) + " tokens, " +
                          engine.model().name + " was trained for a context of " +
                          std::to_string(trained) + "; -c sets a larger one");
  }
  return std::min(prompt_tokens + answer_tokens, trained);
}

}  // namespace minference::cli
