package edgelimit

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
)

// Exit codes of the audit. 1 is Caddy's own: the configuration could not be read.
const (
	exitAuditWarnings = 20 // with --strict
	exitAuditErrors   = 21
)

// auditCommand makes the command `caddy edge-limit audit`.
func auditCommand() *cobra.Command {
	var options auditOptions
	cmd := &cobra.Command{
		Use:   "audit",
		Short: "Checks what a configuration says about who the client is",
		Long: `
Reads a whole Caddy configuration, a Caddyfile or JSON, as a linter does, and
says where a caller can choose whom he is taken for: keys that he can renew,
headers that are believed from anybody, and settings that do not do what they
seem to say. Nothing is loaded, and the configuration need not use edge_limit:
directives of other plugins are read or passed over.

Each finding has a name, which docs/audit.md explains, a severity, a place, what
it means and what to do.

Exit status:

  0   no errors (with --strict: no warnings either); notes do not count
  1   the configuration could not be read
  20  warnings, with --strict
  21  errors`,
		Example: `  $ caddy edge-limit audit --config /etc/caddy/Caddyfile
  $ caddy edge-limit audit --config caddy.json --strict --json`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return fmt.Errorf("unexpected argument %q: name the configuration with --config", args[0])
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			status, err := options.run(cmd.InOrStdin(), cmd.OutOrStdout())
			if err != nil {
				return err
			}
			return endWith(cmd, status)
		},
	}
	flags := cmd.Flags()
	flags.StringVarP(&options.config, "config", "c", "", "the configuration: a file, or - for standard input (default Caddyfile, in this folder)")
	flags.StringVarP(&options.adapter, "adapter", "a", "", "what it is written in (default: seen by the name and the text)")
	flags.BoolVar(&options.json, "json", false, "print one JSON object")
	flags.BoolVar(&options.strict, "strict", false, "fail on warnings too")
	return cmd
}

// auditOptions are the command's arguments.
type auditOptions struct {
	config, adapter string
	json, strict    bool
}

// run audits the configuration and writes what it finds. It returns the exit
// status.
func (o *auditOptions) run(stdin io.Reader, out io.Writer) (status int, err error) {
	filename, content, err := readConfig(o.config, stdin)
	if err != nil {
		return 0, err
	}
	findings, err := auditFile(filename, content, o.adapter)
	if err != nil {
		return 0, err
	}
	write := writeFindings
	if o.json {
		write = writeFindingsJSON
	}
	if err := write(out, filename, findings); err != nil {
		return 0, fmt.Errorf("writing the findings: %w", err)
	}
	switch {
	case count(findings, severityError) > 0:
		return exitAuditErrors, nil
	case o.strict && count(findings, severityWarning) > 0:
		return exitAuditWarnings, nil
	}
	return 0, nil
}

func readConfig(name string, stdin io.Reader) (filename string, content []byte, err error) {
	switch name {
	case "-":
		if content, err = io.ReadAll(stdin); err != nil {
			return "", nil, fmt.Errorf("reading the configuration from standard input: %w", err)
		}
		return "stdin", content, nil
	case "":
		if content, err = os.ReadFile("Caddyfile"); os.IsNotExist(err) {
			return "", nil, fmt.Errorf("no Caddyfile here: name the configuration with --config")
		}
		name = "Caddyfile"
	default:
		content, err = os.ReadFile(name)
	}
	if err != nil {
		return "", nil, fmt.Errorf("reading the configuration: %w", err)
	}
	return name, content, nil
}

// auditFile audits a configuration that is written in what adapter says: "" is
// to be seen by the name and the text.
func auditFile(filename string, content []byte, adapter string) ([]finding, error) {
	if adapter == "" {
		var err error
		if adapter, err = guessAdapter(filename, content); err != nil {
			return nil, err
		}
	}
	read := readJSON
	switch adapter {
	case "json":
	case "caddyfile":
		read = readCaddyfile
	default:
		var err error
		if content, err = adapt(filename, content, adapter); err != nil {
			return nil, err
		}
	}
	config, err := read(filename, content)
	if err != nil {
		return nil, err
	}
	return config.run(), nil
}

// guessAdapter tells a Caddyfile from JSON. Both may begin with a brace.
func guessAdapter(filename string, content []byte) (string, error) {
	switch extension := strings.ToLower(filepath.Ext(filename)); extension {
	case ".json":
		return "json", nil
	case ".yaml", ".yml", ".toml", ".json5", ".jsonc", ".hcl", ".conf", ".nix", ".cue":
		if !strings.HasPrefix(strings.ToLower(filepath.Base(filename)), "caddyfile") {
			return "", fmt.Errorf("%s looks like %s: name what reads it with --adapter (there are %s)", filename, extension[1:], adapterNames())
		}
	}
	if json.Valid(content) {
		return "json", nil
	}
	return "caddyfile", nil
}

// adapt makes JSON of a configuration in another language.
func adapt(filename string, content []byte, name string) ([]byte, error) {
	adapter := caddyconfig.GetAdapter(name)
	if adapter == nil {
		return nil, fmt.Errorf("no adapter %q in this Caddy: there are %s", name, adapterNames())
	}
	adapted, _, err := adapter.Adapt(content, map[string]any{"filename": filename})
	if err != nil {
		return nil, fmt.Errorf("adapting %s with %s: %w", filename, name, err)
	}
	return adapted, nil
}

func adapterNames() string {
	names := []string{"json"}
	for _, module := range caddy.GetModules("caddy.adapters") {
		names = append(names, module.ID.Name())
	}
	return strings.Join(names, ", ")
}

// writeFindings writes findings for people, as compilers do.
func writeFindings(out io.Writer, filename string, findings []finding) error {
	var text strings.Builder
	for _, f := range findings {
		fmt.Fprintf(&text, "%s: %s: %s [%s]\n\tmend: %s\n", f.spot, f.Severity, f.Message, f.ID, f.Mend)
	}
	fmt.Fprintf(&text, "%s: %s, %s, %s\n", filename,
		plural(count(findings, severityError), "error"), plural(count(findings, severityWarning), "warning"), plural(count(findings, severityNote), "note"))
	_, err := io.WriteString(out, text.String())
	return err
}

func plural(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// auditReport is what --json prints.
type auditReport struct {
	Config   string    `json:"config"`
	Errors   int       `json:"errors"`
	Warnings int       `json:"warnings"`
	Notes    int       `json:"notes"`
	Findings []finding `json:"findings"`
}

func writeFindingsJSON(out io.Writer, filename string, findings []finding) error {
	encoder := json.NewEncoder(out)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "\t")
	return encoder.Encode(auditReport{
		Config: filename, Errors: count(findings, severityError), Warnings: count(findings, severityWarning),
		Notes: count(findings, severityNote), Findings: append([]finding{}, findings...),
	})
}
