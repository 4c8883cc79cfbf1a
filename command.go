package edgelimit

import (
	"github.com/spf13/cobra"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
)

func init() {
	caddycmd.RegisterCommand(caddycmd.Command{
		Name:  "edge-limit",
		Usage: "<command>",
		Short: "Proves and checks who edge_limit takes for the client",
		Long: `
Limits for each client are worth as much as the answer to the question who the
client is. These commands prove that answer from outside, and check what a
configuration says about it.`,
		CobraFunc: func(cmd *cobra.Command) {
			for _, subcommand := range subcommands {
				cmd.AddCommand(subcommand())
			}
			cmd.Args = cobra.NoArgs // cobra would answer a mistyped command with help and status 0
			cmd.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
		},
	})
}

// subcommands make the commands of `caddy edge-limit`.
var subcommands = []func() *cobra.Command{newProbeCommand}

// endWith makes the command's process end with a status, without a word about
// it. Status 1 is Caddy's own, for errors: to get it, return an error instead,
// since Caddy makes 0 of a 1 without one.
func endWith(cmd *cobra.Command, status int) error {
	cmd.SilenceErrors = true
	return caddycmd.WrapCommandFuncForCobra(func(caddycmd.Flags) (int, error) { return status, nil })(cmd, nil)
}
