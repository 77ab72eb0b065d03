#include "cli/completion_scripts.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <sstream>

namespace tessera::cli {
namespace {

using Words = std::vector<std::string>;

std::string joined(const Words& words, const std::string& between) {
  std::string text;
  for (const auto& word : words) text += (text.empty() ? "" : between) + word;
  return text;
}

// In quotes of bash and zsh.
std::string quoted(const std::string& text) {
  std::string inside;
  for (const char c : text) {
    inside += c == '\'' ? std::string("'\\''") : std::string(1, c);
  }
  return "'" + inside + "'";
}

std::string quoted_for_fish(const std::string& text) {
  std::string inside;
  for (const char c : text) {
    if (c == '\'' || c == '\\') inside += '\\';
    inside += c;
  }
  return "'" + inside + "'";
}

// The flags of each command and the keys, as patterns " COMMAND FLAG" and
// "* KEY", by what may follow them.
struct FlagsByValue {
  std::map<Words, Words> with_choice;  // choices, patterns
  Words with_file;
  Words with_number;
};

FlagsByValue by_value(const std::vector<OfferedCommand>& commands) {
  FlagsByValue sorted;
  std::set<std::string> seen;
  const auto add = [&](const OfferedFlag& flag, const std::string& path) {
    const std::string pattern = path + " " + flag.text;
    if (!flag.takes_value || !seen.insert(pattern).second) return;
    (!flag.choices.empty() ? sorted.with_choice[flag.choices]
     : flag.takes_file     ? sorted.with_file
                           : sorted.with_number)
        .push_back(pattern);
  };
  for (const OfferedCommand& command : commands) {
    for (const auto& flag : command.flags) add(flag, command.path);
    for (const auto& key : command.keys) add(key, "*");
  }
  return sorted;
}

// As they are typed.
std::vector<OfferedWord> keys_of(const OfferedCommand& command) {
  std::vector<OfferedWord> keys;
  for (const auto& key : command.keys)
    keys.push_back({key.text + "=", key.about});
  return keys;
}

Words paths_of(const std::vector<OfferedCommand>& commands) {
  Words paths;
  for (const auto& command : commands) {
    if (!command.path.empty()) paths.push_back(command.path);
  }
  return paths;
}

// An arm of a case of bash and zsh, where a * in quotes is no pattern.
std::string arm(const Words& patterns, const std::string& body) {
  Words in_quotes;
  for (const auto& pattern : patterns) {
    const bool is_of_all = pattern.starts_with('*');
    in_quotes.push_back(is_of_all ? "*" + quoted(pattern.substr(1))
                                  : quoted(pattern));
  }
  return "    " + joined(in_quotes, "|") + ") " + body + " ;;\n";
}

// The same of fish, where a * outside of quotes is of files.
std::string arm_of_fish(const Words& patterns, const std::string& body) {
  Words in_quotes;
  for (const auto& pattern : patterns) {
    in_quotes.push_back(quoted_for_fish(pattern));
  }
  return "        case " + joined(in_quotes, " ") + "\n            " + body +
         "\n";
}

}  // namespace

// In bash '=' parts words, so that behind it the value alone is replaced.
// `filenames` has readline quote what it inserts, also a '=': it is for files
// alone. What readline sees as another word (one with quotes) is left to it.
std::string bash_completion(const std::vector<OfferedCommand>& commands) {
  std::ostringstream text;
  text << R"(_tessera() {
  local line=${COMP_LINE:0:COMP_POINT} chosen= before= prefix= each
  local words= operands= flags= files=
  local word=${line##*[[:space:]]}
  local -a typed
  read -ra typed <<<"${line%"$word"}"
  for each in "${typed[@]}"; do
    case "$chosen $each" in
)" << arm(paths_of(commands), "chosen+=\" $each\"")
       << R"(    esac
    before=$each
  done
  if [[ $word == -*=* ]]; then
    before=${word%%=*} prefix=${word%%=*}= word=${word#*=}
  fi
  case "$chosen $before" in
)";
  const FlagsByValue flags = by_value(commands);
  for (const auto& [choices, patterns] : flags.with_choice) {
    text << arm(patterns, "words=" + quoted(joined(choices, " ")));
  }
  text << arm(flags.with_file, "files=yes") << arm(flags.with_number, "return")
       << R"(    *)
      case $chosen in
)";
  for (const OfferedCommand& command : commands) {
    Words operands, all;
    for (const auto& word : command.operands) operands.push_back(word.text);
    for (const auto& flag : command.flags) all.push_back(flag.text);
    for (const auto& key : keys_of(command)) all.push_back(key.text);
    text << arm({command.path}, "operands=" + quoted(joined(operands, " ")) +
                                    (command.takes_files ? " files=yes" : "") +
                                    " flags=" + quoted(joined(all, " ")));
  }
  text << R"(      esac
      if [[ -n $prefix ]]; then files=yes
      elif [[ $word == -* || -z $operands$files ]]; then words=$flags files=
      else words=$operands
      fi ;;
  esac
  if [[ -n $files ]]; then
    [[ $word == "${2-$word}" ]] || return
    compopt -o filenames
    mapfile -t COMPREPLY < <(compgen -f -- "$word")
  else
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$word")
    [[ ${COMPREPLY[0]} == *= ]] && compopt -o nospace
  fi
}
complete -o default -F _tessera tessera
)";
  return text.str();
}

namespace {

std::string described(const std::vector<OfferedWord>& words) {
  std::string text;
  for (const auto& word : words) {
    text += "\n        " + quoted(word.text + ":" + word.about);
  }
  return text;
}

}  // namespace

std::string zsh_completion(const std::vector<OfferedCommand>& commands) {
  std::ostringstream text;
  text << R"(#compdef tessera
_tessera() {
  local chosen= before= files= each
  local -a operands flags keys
  for each in "${(@)words[2,CURRENT-1]}"; do
    case "$chosen $each" in
)" << arm(paths_of(commands), "chosen+=\" $each\"")
       << R"(    esac
    before=$each
  done
  if [[ $PREFIX == -*=* ]]; then
    before=${PREFIX%%=*} files=yes
    compset -P 1 '*='
  fi
  case "$chosen $before" in
)";
  const FlagsByValue flags = by_value(commands);
  for (const auto& [choices, patterns] : flags.with_choice) {
    text << arm(patterns, "compadd -- " + joined(choices, " ") + "; return");
  }
  text << arm(flags.with_file, "_files; return")
       << arm(flags.with_number, "_message 'a number'; return") << R"(  esac
  [[ -n $files ]] && { _files; return }
  case $chosen in
)";
  for (const OfferedCommand& command : commands) {
    std::vector<OfferedWord> flags_of(command.flags.begin(),
                                      command.flags.end());
    text << arm({command.path},
                "operands=(" + described(command.operands) + ")" +
                    (command.takes_files ? " files=yes" : "") +
                    "\n      flags=(" + described(flags_of) +
                    ")\n      keys=(" + described(keys_of(command)) + ")");
  }
  text << R"(  esac
  if [[ $PREFIX != -* ]]; then
    (( $#operands )) && { _describe -t words 'word' operands; return }
    [[ -n $files ]] && { _files; return }
  fi
  local none=1
  _describe -o 'flag' flags && none=0
  (( $#keys )) && _describe -o 'key' keys -S '' && none=0
  return none
}
if [[ $funcstack[1] == _tessera ]]; then
  _tessera "$@"  # loaded by zsh, in order to complete
else
  (( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
  compdef _tessera tessera
fi
)";
  return text.str();
}

namespace {

// What prints each word with what it is.
std::string told_by_fish(const std::vector<OfferedWord>& words) {
  std::string text;
  for (const auto& word : words) {
    text += " \\\n                " + quoted_for_fish(word.text) + " " +
            quoted_for_fish(word.about);
  }
  return "printf '%s\\t%s\\n'" + text;
}

// The lines of one command.
std::string body_of_fish(const OfferedCommand& command) {
  std::vector<OfferedWord> flags(command.flags.begin(), command.flags.end());
  std::ranges::copy(keys_of(command), std::back_inserter(flags));
  const std::string rest =
      !command.operands.empty() ? told_by_fish(command.operands)
      : command.takes_files     ? "__tessera_files '' \"$word\""
                                : told_by_fish(flags);
  return "if string match -q -- '-*' \"$word\"\n                " +
         told_by_fish(flags) + "\n            else\n                " + rest +
         "\n            end";
}

}  // namespace

std::string fish_completion(const std::vector<OfferedCommand>& commands) {
  std::ostringstream text;
  text << R"(function __tessera_files
    for each in (complete -C "'' $argv[2]")
        echo -- $argv[1]$each
    end
end
function __tessera_complete
    set -l typed (commandline -opc)
    set -l word (commandline -ct)
    set -l chosen
    set -l before
    set -l prefix
    for each in $typed
        switch "$chosen $each"
)" << arm_of_fish(paths_of(commands), "set chosen \"$chosen $each\"")
       << R"(        end
        set before $each
    end
    if string match -q -- '-*=*' "$word"
        set before (string split -m 1 = -- $word)[1]
        set prefix $before=
        set word (string split -m 1 = -- $word)[2]
    end
    switch "$chosen $before"
)";
  const FlagsByValue flags = by_value(commands);
  for (const auto& [choices, patterns] : flags.with_choice) {
    text << arm_of_fish(patterns, "printf \"$prefix%s\\n\" " +
                                      joined(choices, " ") +
                                      "\n            return");
  }
  text << arm_of_fish(
              flags.with_file,
              "__tessera_files \"$prefix\" \"$word\"\n            return")
       << arm_of_fish(flags.with_number, "return") << R"(    end
    switch "$chosen"
)";
  for (const OfferedCommand& command : commands) {
    text << arm_of_fish({command.path}, body_of_fish(command));
  }
  text << R"(    end
end
complete -c tessera -f -a '(__tessera_complete)'
)";
  return text.str();
}

}  // namespace tessera::cli
