# fish completion for llmcli, which says itself what completes a line
function __llmcli_complete
    set -l words (commandline -opc)
    set -l word (commandline -ct)
    set -l program (string replace -r '^~' $HOME -- $words[1])
    $program _complete fish $words "$word" 2>/dev/null
end
complete -c llmcli -f -a '(__llmcli_complete)'
